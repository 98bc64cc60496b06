//! Search for a shared object: the user's choice, or else libraries loaded in the process, the loader's path, and the
//! folders of NVIDIA's Python packages.

use std::collections::BTreeSet;
use std::env;
use std::ffi::{OsStr, OsString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libloading::Library;
use libloading::os::unix::{Library as UnixLibrary, RTLD_LAZY};
use rustix::fs::{Dir, Mode, OFlags};

use crate::error::Unavailable;

/// Declares a struct of a library's functions with their symbols and types.
macro_rules! function_table {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $table:ident {
            $($name:ident = $symbol:literal ($($type:ty),*) $(-> $result:ty)?;)*
        }
    ) => {
        $(#[$attribute])*
        $visibility struct $table {
            $($visibility $name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
        }

        impl $table {
            /// Finds all functions.
            ///
            /// # Safety
            /// The symbols of the library have the declared types.
            $visibility unsafe fn of(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the caller of `of` passes only a library whose symbols have the declared types.
                unsafe {
                    Ok(Self {
                        $($name: *library.get::<unsafe extern "C" fn($($type),*) $(-> $result)?>($symbol)?,)*
                    })
                }
            }
        }
    };
}
pub(crate) use function_table;

/// Returns how many libraries this process has loaded so far. It grows with each one, and tells whether another search
/// may find what an earlier one did not.
#[must_use]
pub fn libraries_loaded() -> u64 {
    /// Stores the count of the first entry, and ends the iteration.
    ///
    /// # Safety
    /// `info` is an entry, and `count` points to a number.
    unsafe extern "C" fn first(info: *mut libc::dl_phdr_info, _: usize, count: *mut c_void) -> c_int {
        // SAFETY: the caller of `first` passes an entry and a number.
        unsafe { *count.cast::<u64>() = (*info).dlpi_adds };
        1
    }
    let mut count = 0_u64;
    // SAFETY: `first` has the required type, and uses its last argument only during the call.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut count).cast()) };
    count
}

/// A library to search for.
pub(crate) struct LibrarySearch {
    /// Name for messages.
    pub(crate) library: &'static str,
    /// Environment variable with a path, which overrides the search.
    pub(crate) variable: &'static str,
    /// File names, best first.
    pub(crate) names: &'static [&'static str],
    /// Whether to search the folders of NVIDIA's Python packages, if this process has loaded a library from one of
    /// them.
    pub(crate) search_wheels: bool,
    /// The remedy if it is missing.
    pub(crate) remedy: &'static str,
}

impl LibrarySearch {
    /// Returns whether the user chose the library.
    pub(crate) fn is_overridden(&self) -> bool {
        self.override_path().is_some()
    }

    fn override_path(&self) -> Option<PathBuf> {
        env::var_os(self.variable).filter(|path| !path.is_empty()).map(PathBuf::from)
    }

    /// Returns the library if this process has loaded it.
    pub(crate) fn loaded(&self) -> Option<Library> {
        let override_path = self.override_path();
        let names = self.names.iter().map(PathBuf::from);
        let paths = override_path.map_or_else(|| names.collect(), |path| vec![path]);
        // SAFETY: nothing is loaded, so no initialiser runs.
        let loaded = |path: &PathBuf| unsafe { UnixLibrary::open(Some(path), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok();
        paths.iter().find_map(loaded).map(Library::from)
    }

    /// Loads the library. One that is already loaded under one of the names (torch brings some) is reused.
    pub(crate) fn open(&self) -> Result<Library, Unavailable> {
        let override_path = self.override_path();
        let mut paths: Vec<PathBuf> = match &override_path {
            Some(path) => vec![path.clone()],
            None => self.names.iter().map(PathBuf::from).collect(),
        };
        if override_path.is_none() && self.search_wheels {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
            let folders = folders_of_wheels(&maps);
            paths.extend(folders.iter().flat_map(|folder| self.names.iter().map(|name| folder.join(name))));
        }
        let mut errors = Vec::new();
        for path in &paths {
            // SAFETY: loading runs the library's initialisers. It is the vendor's driver or the user's choice, and
            // trusted either way.
            match unsafe { Library::new(path) } {
                Ok(library) => return Ok(library),
                Err(error) => errors.push(error.to_string()),
            }
        }
        let remedy = match &override_path {
            Some(path) => format!("{} is {}; correct or unset it", self.variable, path.display()),
            None => self.remedy.to_owned(),
        };
        let text = format!("{} could not be loaded ({}); {remedy}", self.library, errors.join("; "));
        Err(Unavailable { text, is_missing: true })
    }
}

/// Returns the library folders of all of NVIDIA's Python packages, if a memory map has a library from one of them: for
/// example `.../nvidia/cu13/lib` and `.../nvidia/cufile/lib`. They are not on the loader's path.
fn folders_of_wheels(maps: &str) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let paths = maps.lines().filter_map(|line| line.find('/').map(|start| Path::new(&line[start..])));
    let is_root = |folder: &&Path| folder.file_name().is_some_and(|name| name == "nvidia");
    let roots: BTreeSet<&Path> = paths.filter_map(|path| path.ancestors().find(is_root)).collect();
    for root in roots {
        // Not `std::fs::read_dir`, which panics if closing the folder fails, as on a lost network file system.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(root, flags, Mode::empty()).and_then(Dir::new);
        let Ok(packages) = opened else { continue };
        let names = packages.flatten().map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned());
        let is_own = |name: &OsString| name != "." && name != "..";
        let known = names.filter(is_own).map(|name| root.join(name).join("lib")).filter(|folder| folder.is_dir());
        for folder in known {
            if !folders.contains(&folder) {
                folders.push(folder);
            }
        }
    }
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_share_a_folder() {
        let root = std::env::temp_dir().join(format!("deepnvme-cuda-{}", std::process::id()));
        let wheels = root.join("site-packages/nvidia");
        for package in ["cu13", "cufile"] {
            std::fs::create_dir_all(wheels.join(package).join("lib")).unwrap();
        }
        std::fs::create_dir_all(wheels.join("no_libraries")).unwrap();
        let maps = format!(
            "7f00-7f01 r-xp 00000000 fe:00 12 {0}/cu13/lib/libcudart.so.13\n7f01-7f02 rw-p 00000000 00:00 0\n\
             7f02-7f03 r-xp 00000000 fe:00 13 {0}/cu13/lib/libcudart.so.13\n7f04-7f05 r-xp 0 fe:00 9 /usr/lib/libc.so.6\n",
            wheels.display()
        );
        assert_eq!(folders_of_wheels(&maps), [wheels.join("cu13/lib"), wheels.join("cufile/lib")]);
        assert_eq!(folders_of_wheels("7f00-7f01 r-xp 0 fe:00 9 /usr/lib/libc.so.6\n"), Vec::<PathBuf>::new());
        std::fs::remove_dir_all(root).unwrap();
    }
}
