//! A valid backend with one defect.

use std::sync::Arc;

use deepnvme_io::Result;
use deepnvme_io::backend::{Backend, BackendKind, Wake};
use deepnvme_io::op::{Completion, Errno, Op, OpKind, Submit, Token};

/// The part of the contract that a backend breaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Defect {
    None,
    LosesOps,
    ReturnsOpsTwice,
    TakesTooMany,
    SaysItIsDeeper,
    ChangesTokens,
    TruncatesTokens,
    ChangesOffsets,
    SwapsIovecs,
    KeepsOneIovec,
    ReadsPastTheOp,
    MovesWritesByOne,
    TruncatesOffsets,
    ClaimsFullReads,
    HidesErrors,
    ClaimsSyncedBytes,
    ClearsTheVector,
    KeepsMemory,
    AbandonsOps,
    FailsAll,
}

pub(crate) struct Broken {
    defect: Defect,
    inner: Option<Box<dyn Backend>>,
    kept: Vec<Op>,
    count: u64,
}

impl Broken {
    pub(crate) fn new(defect: Defect, inner: Box<dyn Backend>) -> Self {
        Self { defect, inner: Some(inner), kept: Vec::new(), count: 0 }
    }

    fn inner(&mut self) -> &mut dyn Backend {
        self.inner.as_deref_mut().expect("only drop takes it")
    }

    fn spoil_op(&mut self, op: &mut Op) {
        match self.defect {
            Defect::SwapsIovecs => op.iovecs.reverse(),
            Defect::KeepsOneIovec => op.iovecs.truncate(1),
            Defect::MovesWritesByOne if op.kind == OpKind::Write => op.offset += 1,
            Defect::TruncatesOffsets => op.offset &= 0xffff_ffff,
            Defect::KeepsMemory => self.kept.push(twin(op)),
            _ => {}
        }
    }

    fn spoil_completion(&mut self, completion: &mut Completion) {
        let op = &mut completion.op;
        match self.defect {
            Defect::ChangesTokens => op.token = Token(op.token.0 + 1),
            Defect::TruncatesTokens => op.token = Token(op.token.0 & 0xffff_ffff),
            Defect::ChangesOffsets => op.offset += op.bytes() as u64,
            Defect::ClaimsFullReads => completion.result = completion.result.map(|_| op.bytes()),
            Defect::HidesErrors => completion.result = completion.result.or(Ok(op.bytes())),
            Defect::ClaimsSyncedBytes if op.iovecs.is_empty() => {
                completion.result = completion.result.map(|_| 1);
            }
            Defect::FailsAll => completion.result = Err(Errno::IO),
            _ => {}
        }
    }
}

/// Duplicates an op.
fn twin(op: &Op) -> Op {
    Op {
        token: op.token,
        kind: op.kind,
        file: op.file.clone(),
        offset: op.offset,
        iovecs: op.iovecs.clone(),
        cufile: op.cufile.clone(),
    }
}

impl Backend for Broken {
    fn kind(&self) -> BackendKind {
        BackendKind::Simulated
    }

    fn depth(&self) -> u32 {
        let depth = self.inner.as_ref().map_or(0, |inner| inner.depth());
        match self.defect {
            Defect::SaysItIsDeeper => depth + 1,
            Defect::TakesTooMany => depth / 2,
            _ => depth,
        }
    }

    fn in_flight(&self) -> u32 {
        self.inner.as_ref().map_or(0, |inner| inner.in_flight())
    }

    fn submit(&mut self, mut op: Op) -> Submit {
        self.count += 1;
        if self.defect == Defect::ReadsPastTheOp && op.kind == OpKind::Read && op.offset > 0 {
            // One byte too early reads the right number of wrong bytes.
            op.offset -= 1;
        }
        self.spoil_op(&mut op);
        self.inner().submit(op)
    }

    fn flush(&mut self) -> Result<()> {
        self.inner().flush()
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        let mut own = Vec::new();
        self.inner().reap(min, &mut own)?;
        own.iter_mut().for_each(|completion| self.spoil_completion(completion));
        match self.defect {
            Defect::LosesOps if self.count > 3 => drop(own.pop()),
            Defect::ReturnsOpsTwice => {
                let again = own.first().map(|one| Completion { op: twin(&one.op), result: one.result });
                own.extend(again);
            }
            Defect::ClearsTheVector => completions.clear(),
            _ => {}
        }
        completions.append(&mut own);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.inner.as_ref().map(|inner| inner.waker()).expect("only drop takes it")
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        if self.defect == Defect::AbandonsOps {
            std::mem::forget(self.inner.take());
        }
        if self.defect == Defect::KeepsMemory {
            std::mem::forget(std::mem::take(&mut self.kept));
        }
    }
}
