//! Writing the manifest of a new stripe set: first privately, then under its name.

use std::path::Path;

use super::temporary::{self, Temporary};
use crate::stripe_set::{StripeSet, invalid};
use deepnvme_io::Result;
use deepnvme_io::op::Errno;

impl StripeSet {
    /// Writes the manifest to its path unless one exists: first privately, then renamed.
    ///
    /// # Errors
    /// The error of the folder or of an existing manifest, or `InvalidInput` if the manifest of another set exists.
    pub fn write_manifest(&self) -> Result<()> {
        let path = self.manifest_path();
        let mut file = self.private_manifest(&path)?;
        match file.rename_new(&path) {
            Ok(()) => Ok(()),
            // Another process was faster. This is fine if both wrote the same set.
            Err(Errno::EXIST) => {
                let absolute =
                    |set: &Self| set.parts().iter().map(std::path::absolute).collect::<std::io::Result<Vec<_>>>();
                let there = Self::from_manifest(&path)?;
                let is_same = there.stripe_bytes() == self.stripe_bytes()
                    && matches!((absolute(&there), absolute(self)), (Ok(there), Ok(own)) if there == own);
                let differs = || invalid("another set of the same name was made meanwhile; open it again".into());
                if is_same { Ok(()) } else { Err(differs().at_path(path)) }
            }
            Err(errno) => Err(temporary::rename_error(errno, &path)),
        }
    }

    fn private_manifest(&self, path: &Path) -> Result<Temporary> {
        let text = self.recorded(path).to_list()?;
        let file = Temporary::new(path)?;
        file.fill(text.as_bytes()).map_err(|error| error.at_path(path))?;
        file.take_mode_of(path)?;
        Ok(file)
    }
}
