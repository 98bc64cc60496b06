//! Opening the driver of cuFile where that can end, and without a trace in the user's folder.
//!
//! Two things that NVIDIA's library does there, seen with 1.17: it reads `/proc/modules` until its end, and never comes to one
//! where there is no such file; and it opens `cufile.log` in the current folder before it looks at any parameter that
//! `cuFileSetParameterString` could set. Only its environment variables come earlier, and those are the user's.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::thread::UnshareFlags;

/// What cuFile calls its log.
const LOG: &str = "cufile.log";
/// Where the kernel lists its modules.
const MODULES: &str = "/proc/modules";

/// Why opening would not end; `None` where it does. A library that somebody has named is trusted with that.
pub(super) fn obstacle(is_named: bool) -> Option<String> {
    let is_there = Path::new(MODULES).exists();
    (!is_named && !is_there).then(|| {
        format!(
            "it would look for nvidia-fs in {MODULES} for ever, which this kernel does not have (a sandbox, as a rule)"
        )
    })
}

/// Makes the call where relative paths lead to a folder of its own, in which the log's name leads nowhere. The folder is gone
/// afterwards; the process as a whole stays in its current one. Without a thread for it, it is not made.
pub(super) fn without_log<T: Send>(call: impl FnOnce() -> T + Send) -> io::Result<T> {
    let (log, settings) = (env::var_os("CUFILE_LOGFILE_PATH"), env::var_os("CUFILE_ENV_PATH_JSON"));
    if needs_current_folder(log.as_deref(), settings.as_deref()) {
        return Ok(call());
    }
    thread::scope(|scope| {
        let run = || {
            // What it may not leave it stays in (containers commonly forbid it), and takes away what is new there.
            let Some(folder) = leave() else { return without_new_log(&env::current_dir().unwrap_or_default(), call) };
            let answer = call();
            let _ = fs::remove_dir_all(folder);
            answer
        };
        match thread::Builder::new().name("deepnvme-cufile".into()).spawn_scoped(scope, run)?.join() {
            Ok(answer) => Ok(answer),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Whether the user has said where the log is to be, or named settings by a path that begins in the current folder.
fn needs_current_folder(log: Option<&OsStr>, settings: Option<&OsStr>) -> bool {
    let is_relative = |path: &OsStr| !path.is_empty() && Path::new(path).is_relative();
    log.is_some_and(|path| !path.is_empty()) || settings.is_some_and(is_relative)
}

/// Gives this thread, and those that it starts, a current folder of their own: a new one.
fn leave() -> Option<PathBuf> {
    // SAFETY: only what the current folder is gets apart; descriptors and memory stay common to all threads.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }.ok()?;
    let folder = env::temp_dir().join(format!("deepnvme-cufile-{}-{:?}", std::process::id(), thread::current().id()));
    // Its own, whatever the umask is: all that is in it goes.
    fs::DirBuilder::new().mode(0o700).create(&folder).ok()?;
    // Without it, what is logged goes to a file that is deleted with its folder.
    let _ = symlink("/dev/null", folder.join(LOG));
    if env::set_current_dir(&folder).is_err() {
        let _ = fs::remove_dir_all(&folder);
        return None;
    }
    Some(folder)
}

/// Deletes the log in a folder after the call, if it was not there before, and this process has it open: it is cuFile's then.
fn without_new_log<T>(folder: &Path, call: impl FnOnce() -> T) -> T {
    let log = folder.join(LOG);
    let was_there = log.symlink_metadata().is_ok();
    let answer = call();
    // Of /proc, whose closing cannot fail: the standard library panics where it does.
    let descriptors = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let mut targets = descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
    if !was_there && targets.any(|target| target == log) {
        let _ = fs::remove_file(&log);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_lead_elsewhere_for_the_call_only() {
        let here = env::current_dir().unwrap();
        let there = without_log(|| {
            let there = env::current_dir().unwrap();
            fs::write("cufile.log", "nonsense").unwrap();
            fs::write("another.log", "nonsense").unwrap();
            there
        });
        let there = there.unwrap();
        assert_eq!(env::current_dir().unwrap(), here);
        // Where a sandbox forbids it, the call is made all the same.
        if there == here {
            let _ = (fs::remove_file("cufile.log"), fs::remove_file("another.log"));
        } else {
            assert!(!there.exists());
            assert!(!here.join("cufile.log").exists() && !here.join("another.log").exists());
        }
    }

    #[test]
    fn a_log_that_was_made_is_taken_away_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let log = folder.join(LOG);
        let open = || fs::File::create(&log).unwrap();
        let kept = without_new_log(&folder, open);
        assert!(!log.exists());
        drop(kept);
        // Somebody else's, who has made it meanwhile.
        without_new_log(&folder, || drop(open()));
        assert!(log.exists());
        // One that was there.
        let kept = without_new_log(&folder, open);
        assert!(log.exists());
        drop(kept);
    }

    #[test]
    fn what_the_user_has_said_counts() {
        let needs = |log: &str, settings: &str| needs_current_folder(Some(log.as_ref()), Some(settings.as_ref()));
        assert!(needs("/var/log/x", "") && needs("x.log", "/etc/x.json") && needs("", "cufile.json"));
        assert!(!needs("", "/etc/x.json") && !needs_current_folder(None, None));
    }

    #[test]
    fn a_named_library_is_trusted() {
        assert_eq!(obstacle(true), None);
        assert_eq!(obstacle(false).is_some(), !Path::new(MODULES).exists());
    }
}
