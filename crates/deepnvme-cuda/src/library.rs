//! Where a shared object is looked for: what the user says, what the process has loaded, the loader's own path.

use std::env;
use std::path::PathBuf;

use libloading::Library;

use crate::error::Absent;

/// A library to be found.
pub(crate) struct Wanted {
    /// What it is, for people.
    pub(crate) what: &'static str,
    /// An environment variable with a path, which comes before everything else.
    pub(crate) variable: &'static str,
    /// File names, the best first.
    pub(crate) names: &'static [&'static str],
    /// What to do where there is none.
    pub(crate) remedy: &'static str,
}

impl Wanted {
    /// Loads it. What the process has loaded under one of the names already (torch brings some) is taken from there.
    pub(crate) fn open(&self) -> Result<Library, Absent> {
        let told = env::var_os(self.variable).filter(|path| !path.is_empty()).map(PathBuf::from);
        let paths: Vec<PathBuf> = match &told {
            Some(path) => vec![path.clone()],
            None => self.names.iter().map(PathBuf::from).collect(),
        };
        let mut said = Vec::new();
        for path in &paths {
            // SAFETY: loading runs the library's initialisers. It is the vendor's driver, or what the user has named, and
            // both are trusted with the process already.
            match unsafe { Library::new(path) } {
                Ok(library) => return Ok(library),
                Err(error) => said.push(error.to_string()),
            }
        }
        let remedy = match &told {
            Some(path) => format!("{} names {}; mend it, or unset it", self.variable, path.display()),
            None => self.remedy.to_owned(),
        };
        Err(Absent { text: format!("{} could not be loaded ({}); {remedy}", self.what, said.join("; ")) })
    }
}
