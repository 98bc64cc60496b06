//! A backend with GPUDirect Storage, without an engine: for programs that drive backends directly, for contract tests,
//! and for reports.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use deepnvme_cuda::{CuFile, TransferCounts};
use deepnvme_mem::Device;
use smallvec::smallvec;

use super::registry::GpuRegistry;
use crate::backend::gds::{Directness, Gds, GdsBackend, device_of, judge, obstacle_of};
use crate::backend::{Backend, BackendSetup};
use crate::file::TensorFile;
use crate::op::{Op, OpKind, RegisteredFile, Token};
use crate::split::IoMode;

/// GPUDirect Storage for some backends.
#[derive(Debug)]
pub struct GdsAccess {
    gpus: Arc<GpuRegistry>,
    gds: Arc<Gds>,
}

/// The result of a read with cuFile.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GdsTrial {
    /// The bytes bypassed host memory. Contains cuFile's counts, if it has any that tell.
    Direct(Option<TransferCounts>),
    /// cuFile refused the file, or copied the bytes through the host, by these counts or by the rules.
    Copied(String, Option<TransferCounts>),
    /// The file cannot be opened for direct I/O, or the read failed.
    Failed(String),
    /// cuFile does not start for this reason.
    NotStarted(String),
    /// There is no cuFile, no such GPU, or no memory on it.
    NotFound,
}

impl GdsAccess {
    /// Creates an access without opening cuFile.
    #[must_use]
    pub fn new() -> Self {
        let gpus = Arc::<GpuRegistry>::default();
        let gds = Arc::new(Gds::new(Arc::<GpuRegistry>::clone(&gpus)));
        Self { gpus, gds }
    }

    /// Returns a backend that moves ops with GPU memory through cuFile, and all others through `main`. GPU ops need the
    /// registration of their file from [`register`](Self::register), or end with `EBADF`.
    #[must_use]
    pub fn combine(&self, main: Box<dyn Backend>, setup: &BackendSetup) -> Box<dyn Backend> {
        Box::new(GdsBackend::new(main, setup, &self.gds))
    }

    /// Registers a file with cuFile.
    ///
    /// # Errors
    /// The reason if it cannot: cuFile is missing, it would copy through the host, or it refuses the file.
    pub fn register(&self, file: &Arc<OwnedFd>) -> Result<RegisteredFile, String> {
        self.gds.register_file(file)
    }

    /// Reads the first bytes of a file into new memory of a GPU with cuFile, and returns which way they took. cuFile's
    /// own statistics decide. If these cannot tell, the read was direct if cuFile refuses files that it would copy.
    /// Otherwise the rules of NVIDIA's documentation decide.
    #[must_use]
    pub fn try_read(&self, gpu: u32, file: &TensorFile, bytes: usize) -> GdsTrial {
        let cufile = match CuFile::open() {
            Ok(cufile) => cufile,
            Err(absent) if absent.is_missing() => return GdsTrial::NotFound,
            Err(absent) => return GdsTrial::NotStarted(absent.to_string()),
        };
        let Ok(memory) = self.gpus.get(Device::Cuda { index: gpu }).and_then(|gpu| gpu.allocate(bytes)) else {
            return GdsTrial::NotFound;
        };
        let file = match file.part_at(0).0.descriptor(IoMode::Direct) {
            Ok(file) => file,
            Err(error) => return GdsTrial::Failed(error.to_string()),
        };
        let cufile_registration = match self.register(&file) {
            Ok(registration) => Some(registration),
            Err(refusal) => return GdsTrial::Copied(refusal, None),
        };
        let (kind, iovecs) = (OpKind::Read, smallvec![memory.region()]);
        let op = Op { token: Token(0), kind, file, offset: 0, iovecs, cufile: cufile_registration };
        let (read, counts) = cufile.counted(true, || self.gds.perform(&op));
        if let Err(errno) = read {
            let refusal = op.cufile.as_ref().and_then(RegisteredFile::refusal);
            return GdsTrial::Failed(refusal.unwrap_or_else(|| format!("the read failed ({errno})")));
        }
        match counts.map(judge) {
            Some(Directness::Copied(reason)) => GdsTrial::Copied(reason, counts),
            Some(Directness::Direct) => GdsTrial::Direct(counts),
            Some(Directness::Unknown) | None if cufile.refuses_copies() => GdsTrial::Direct(None),
            Some(Directness::Unknown) | None => {
                obstacle_of(device_of(&op.file)).map_or(GdsTrial::Direct(None), |rule| GdsTrial::Copied(rule, None))
            }
        }
    }
}

impl Default for GdsAccess {
    fn default() -> Self {
        Self::new()
    }
}
