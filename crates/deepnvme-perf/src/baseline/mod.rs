//! What people measure disks with today, run beside us on files of its own.

pub mod fio;
