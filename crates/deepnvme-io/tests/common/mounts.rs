//! Small file systems on loop devices, mounted by the test. Skipped visibly without the necessary rights or tools.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use deepnvme_testkit::data::temp_dir;
use tempfile::TempDir;

/// A mounted file system. Unmounted, and its loop device detached, when dropped.
pub(crate) struct Mounted {
    folder: PathBuf,
    device: Option<String>,
    dir: TempDir,
}

/// A file that is a block device. Detached when dropped.
pub(crate) struct LoopDevice {
    pub(crate) path: PathBuf,
    _dir: TempDir,
}

impl Mounted {
    /// Creates a file system of this size with `mkfs.<kind>` and mounts it.
    pub(crate) fn image(kind: &str, image_mib: u64, sector_bytes: u64, options: &str) -> Result<Self, String> {
        let dir = temp_dir();
        let made = attach(&dir, image_mib, sector_bytes).and_then(|device| {
            let mut mounted = Self { folder: dir.path().to_path_buf(), device: Some(device.clone()), dir };
            let quiet: &[&str] = if kind == "xfs" { &["-q", "-f"] } else { &["-q", "-F"] };
            run(Command::new(format!("mkfs.{kind}")).args(quiet).arg(&device))?;
            mounted.mount(&["-t", kind, "-o", options, &device])?;
            Ok(mounted)
        });
        made.map_err(|why| format!("no {kind} of our own: {why}"))
    }

    /// Mounts a tmpfs of this size.
    pub(crate) fn tmpfs(size_mib: u64) -> Result<Self, String> {
        let dir = temp_dir();
        let mut mounted = Self { folder: dir.path().to_path_buf(), device: None, dir };
        let made = mounted.mount(&["-t", "tmpfs", "-o", &format!("size={size_mib}m"), "none"]);
        made.map_err(|why| format!("no tmpfs of our own: {why}"))?;
        Ok(mounted)
    }

    /// Mounts an overlay whose changes go to this folder.
    pub(crate) fn overlay(upper_base: &Path) -> Result<Self, String> {
        let dir = temp_dir();
        let [lower, upper, work] = ["lower", "upper", "work"].map(|name| upper_base.join(name));
        for folder in [&lower, &upper, &work] {
            std::fs::create_dir(folder).expect("a folder for the overlay");
        }
        let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
        let mut mounted = Self { folder: dir.path().to_path_buf(), device: None, dir };
        let made = mounted.mount(&["-t", "overlay", "-o", &options, "none"]);
        made.map_err(|why| format!("no overlay of our own: {why}"))?;
        Ok(mounted)
    }

    /// Returns the mount point.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Remounts it read-only.
    pub(crate) fn make_read_only(&self) {
        run(Command::new("mount").args(["-o", "remount,ro"]).arg(&self.folder)).expect("a mount of ours");
    }

    fn mount(&mut self, arguments: &[&str]) -> Result<(), String> {
        let folder = self.dir.path().join("mounted");
        std::fs::create_dir(&folder).map_err(|error| error.to_string())?;
        run(Command::new("mount").args(arguments).arg(&folder))?;
        self.folder = folder;
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.folder != self.dir.path() {
            unmount(&self.folder);
        }
        if let Some(device) = &self.device {
            let _ = run(Command::new("losetup").args(["-d", device]));
        }
    }
}

impl LoopDevice {
    /// Creates a block device of this size.
    pub(crate) fn new(image_mib: u64, sector_bytes: u64) -> Result<Self, String> {
        let dir = temp_dir();
        let device = attach(&dir, image_mib, sector_bytes);
        let device = device.map_err(|why| format!("no block device of our own: {why}"))?;
        Ok(Self { path: device.into(), _dir: dir })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = run(Command::new("losetup").arg("-d").arg(&self.path));
    }
}

/// Unmounts with retries: a process that another test is starting inherits our descriptors for a moment. After that,
/// the folder is no longer in use.
fn unmount(folder: &Path) {
    for _ in 0..50 {
        if run(Command::new("umount").arg(folder)).is_ok() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = run(Command::new("umount").arg("--lazy").arg(folder));
}

fn attach(dir: &TempDir, image_mib: u64, sector_bytes: u64) -> Result<String, String> {
    let image = dir.path().join("image");
    let file = std::fs::File::create(&image).map_err(|error| error.to_string())?;
    file.set_len(image_mib << 20).map_err(|error| error.to_string())?;
    run(Command::new("losetup").args(["-f", "--show", "-b", &sector_bytes.to_string()]).arg(&image))
}

/// Returns the command's output, or why it failed.
fn run(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{name}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(format!("{name}: {}", String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ")))
}
