//! Run many seeds on all CPUs: `make simulate`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for people")]

use std::process::ExitCode;

#[cfg(not(simulated))]
fn main() -> ExitCode {
    eprintln!("built without --cfg simulated: use `make simulate`");
    ExitCode::from(2)
}

#[cfg(simulated)]
fn main() -> ExitCode {
    simulated::main()
}

#[cfg(simulated)]
mod simulated {
    use std::process::ExitCode;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use deepnvme_simulation::run::{RunReport, run};
    use deepnvme_simulation::scenario::ScenarioKind;

    const USAGE: &str =
        "simulate [--seeds N] [--first N] [--jobs N] [--only files|stripes|...] [--keep-going] [--twice]";
    /// Interval between progress lines.
    const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

    #[derive(Clone)]
    struct Options {
        seeds: u64,
        first: u64,
        jobs: u64,
        only: Option<ScenarioKind>,
        keeps_going: bool,
        twice: bool,
    }

    fn options() -> Result<Options, String> {
        let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
        let mut found = Options { seeds: 100_000, first: 0, jobs, only: None, keeps_going: false, twice: false };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut number = || {
                let value = arguments.next().unwrap_or_default();
                value.parse().map_err(|_| format!("{argument} wants a number, not {value:?}"))
            };
            match argument.as_str() {
                "--seeds" => found.seeds = number()?,
                "--first" => found.first = number()?,
                "--jobs" => found.jobs = number()?.max(1),
                "--keep-going" => found.keeps_going = true,
                "--twice" => found.twice = true,
                "--only" => {
                    let name = arguments.next().unwrap_or_default();
                    let mut all = ScenarioKind::ALL.into_iter().chain(ScenarioKind::NAMED);
                    let kind = all.find(|kind| kind.name() == name);
                    found.only = Some(kind.ok_or_else(|| format!("no such scenario: {name}"))?);
                }
                _ => return Err(format!("unknown option {argument}\n{USAGE}")),
            }
        }
        Ok(found)
    }

    /// Runs the seeds. Exit status: 1 if a seed failed.
    pub(super) fn main() -> ExitCode {
        let options = match options() {
            Ok(options) => options,
            Err(problem) => {
                eprintln!("{problem}");
                return ExitCode::from(2);
            }
        };
        let [next, done, failed, steps, crash_points] = [(); 5].map(|()| AtomicU64::new(0));
        let began = Instant::now();
        let print_progress = || {
            let (done, seconds) = (done.load(Ordering::Relaxed), began.elapsed().as_secs_f64());
            println!(
                "{done} of {} seeds, {:.0} seeds/s, {:.0} steps a seed, {} crashes checked, {} failed",
                options.seeds,
                done as f64 / seconds.max(1e-3),
                steps.load(Ordering::Relaxed) as f64 / done.max(1) as f64,
                crash_points.load(Ordering::Relaxed),
                failed.load(Ordering::Relaxed)
            );
        };
        std::thread::scope(|scope| {
            let work = || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let is_over = failed.load(Ordering::Relaxed) > 0 && !options.keeps_going;
                    if index >= options.seeds || is_over {
                        return;
                    }
                    let seed = options.first + index;
                    let mut report = run(seed, options.only);
                    if options.twice {
                        let again = run(seed, options.only);
                        if (again.trace, again.steps) != (report.trace, report.steps) {
                            report.failures.push("two executions of the seed differ".into());
                        }
                    }
                    steps.fetch_add(report.steps, Ordering::Relaxed);
                    crash_points.fetch_add(report.crash_points, Ordering::Relaxed);
                    done.fetch_add(1, Ordering::Relaxed);
                    if !report.failures.is_empty() {
                        failed.fetch_add(1, Ordering::Relaxed);
                        print_failure(seed, &report, options.only);
                    }
                }
            };
            let workers: Vec<_> = (0..options.jobs).map(|_| scope.spawn(work)).collect();
            let mut printed = Instant::now();
            while workers.iter().any(|worker| !worker.is_finished()) {
                std::thread::sleep(Duration::from_millis(20));
                if printed.elapsed() > PROGRESS_INTERVAL {
                    printed = Instant::now();
                    print_progress();
                }
            }
        });
        print_progress();
        if failed.load(Ordering::Relaxed) > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }

    fn print_failure(seed: u64, report: &RunReport, only: Option<ScenarioKind>) {
        println!("seed {seed} failed ({}, {} steps):", report.kind.name(), report.steps);
        for failure in &report.failures {
            println!("  {failure}");
        }
        // Without it, the seed would draw a scenario.
        let only = only.map_or_else(String::new, |kind| format!(" ONLY={}", kind.name()));
        println!("  replay, step by step: make simulate FIRST_SEED={seed} SEEDS=1{only} TELL=1");
    }
}
