//! Opens the driver of cuFile, without hanging and without a log in the user's folder.
//!
//! Two problems of NVIDIA's library, seen with 1.17: without `/proc/modules` it loops forever reading it, and it opens
//! `cufile.log` in the current folder before it reads any parameter that `cuFileSetParameterString` could set. Only its
//! environment variables come earlier, and those belong to the user.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::thread::UnshareFlags;

/// Name of cuFile's log.
const LOG: &str = "cufile.log";
/// The kernel's list of modules.
const MODULES: &str = "/proc/modules";

/// Returns why opening would hang; `None` if it would not. A library that the user chose is trusted.
pub(super) fn why_not(is_overridden: bool) -> Option<String> {
    let is_there = Path::new(MODULES).exists();
    (!is_overridden && !is_there).then(|| {
        format!("it would search for nvidia-fs in {MODULES} forever, which does not exist here (usually a sandbox)")
    })
}

/// Calls with a private current folder in which the log is discarded, on a thread of its own. The folder is removed
/// afterwards, and the process keeps its current folder. Without a thread, the call is not made. If the user's choices
/// need the current folder, the call is made directly.
pub(super) fn without_log<T: Send>(call: impl FnOnce() -> T + Send) -> io::Result<T> {
    let (log, settings) = (env::var_os("CUFILE_LOGFILE_PATH"), env::var_os("CUFILE_ENV_PATH_JSON"));
    if needs_current_folder(log.as_deref(), settings.as_deref()) {
        return Ok(call());
    }
    thread::scope(|scope| {
        let run = || {
            // Containers commonly forbid changing the folder of one thread. Then call in the current one, and remove a
            // new log.
            let Some(folder) = enter_private_folder() else {
                return without_new_log(&env::current_dir().unwrap_or_default(), call);
            };
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

/// Returns whether the user's choices need the current folder: a path of the log, or a relative path of the settings.
fn needs_current_folder(log: Option<&OsStr>, settings: Option<&OsStr>) -> bool {
    let is_relative = |path: &OsStr| !path.is_empty() && Path::new(path).is_relative();
    log.is_some_and(|path| !path.is_empty()) || settings.is_some_and(is_relative)
}

/// Gives this thread and its children a new, private current folder.
fn enter_private_folder() -> Option<PathBuf> {
    // SAFETY: separates only the root folder, the current folder and the umask; descriptors and memory stay shared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }.ok()?;
    let folder = env::temp_dir().join(format!("deepnvme-cufile-{}-{:?}", std::process::id(), thread::current().id()));
    // Private, regardless of the umask: its contents are removed.
    fs::DirBuilder::new().mode(0o700).create(&folder).ok()?;
    // Without the link, the log goes to a file that is removed with its folder.
    let _ = symlink("/dev/null", folder.join(LOG));
    if env::set_current_dir(&folder).is_err() {
        let _ = fs::remove_dir_all(&folder);
        return None;
    }
    Some(folder)
}

/// Removes the log after the call if it is new and this process has it open, so that it is cuFile's.
fn without_new_log<T>(folder: &Path, call: impl FnOnce() -> T) -> T {
    let log = folder.join(LOG);
    let was_there = log.symlink_metadata().is_ok();
    let answer = call();
    // `read_dir` panics if closing the folder fails, which cannot happen in /proc.
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
    fn the_private_folder_is_for_the_call_only() {
        let here = env::current_dir().unwrap();
        let there = without_log(|| {
            let there = env::current_dir().unwrap();
            fs::write("cufile.log", "nonsense").unwrap();
            fs::write("another.log", "nonsense").unwrap();
            there
        });
        let there = there.unwrap();
        assert_eq!(env::current_dir().unwrap(), here);
        // If a sandbox forbids it, the call is made anyway.
        if there == here {
            let _ = (fs::remove_file("cufile.log"), fs::remove_file("another.log"));
        } else {
            assert!(!there.exists());
            assert!(!here.join("cufile.log").exists() && !here.join("another.log").exists());
        }
    }

    #[test]
    fn only_a_new_log_of_this_process_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let log = folder.join(LOG);
        let open = || fs::File::create(&log).unwrap();
        let kept = without_new_log(&folder, open);
        assert!(!log.exists());
        drop(kept);
        // Created by another process meanwhile.
        without_new_log(&folder, || drop(open()));
        assert!(log.exists());
        // One that existed before.
        let kept = without_new_log(&folder, open);
        assert!(log.exists());
        drop(kept);
    }

    #[test]
    fn the_settings_of_the_user_count() {
        let needs = |log: &str, settings: &str| needs_current_folder(Some(log.as_ref()), Some(settings.as_ref()));
        assert!(needs("/var/log/x", "") && needs("x.log", "/etc/x.json") && needs("", "cufile.json"));
        assert!(!needs("", "/etc/x.json") && !needs_current_folder(None, None));
    }

    #[test]
    fn a_chosen_library_is_trusted() {
        assert_eq!(why_not(true), None);
        assert_eq!(why_not(false).is_some(), !Path::new(MODULES).exists());
    }
}
