//! Other tools that run the same workload, for comparison.

pub mod fio;
mod fio_report;
