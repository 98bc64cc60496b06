//! Torch archives: the ZIP file, and the pickle in it.

use std::sync::Arc;

use deepnvme_checkpoint::Progress;
use deepnvme_checkpoint::read::{Reader, Verify};
use deepnvme_checkpoint::write::SaveOptions;
use deepnvme_file::Target;
use deepnvme_format::archive::{ArchivePlan, RecordSpec};
use deepnvme_io::mem::Buffer;
use deepnvme_testkit::guard::run_limited;

use crate::attack::{MUTATIONS, attack_bytes, engine, load_file};
use crate::common::{pickle, plan_archive, random};
use crate::pickle::mutate_pickle;
use crate::zip::mutate_zip;

#[test]
fn archives() {
    run_limited("archives::archives", |guard| {
        let (folder, engine) = (tempfile::tempdir().unwrap(), engine());
        let path = folder.path().join("a.pt");
        let save = plan_archive(&path, &[random(100, 1), Vec::new(), random(3, 2)], SaveOptions::default());
        save.run(Arc::new(crate::attack::engine()), &Target::from(&path), Arc::default()).unwrap();
        let whole = std::fs::read(&path).unwrap();
        attack_bytes(guard, &path, &whole, mutate_zip, || load_file(&engine, &path));
    });
}

#[test]
fn pickles() {
    run_limited("archives::pickles", |guard| {
        let (folder, engine) = (tempfile::tempdir().unwrap(), engine());
        let path = folder.path().join("a.pt");
        let storages = [random(100, 1), Vec::new(), random(3, 2)];
        let (whole, mut dice, mut refused) = (pickle(&storages), fastrand::Rng::with_seed(13), 0);
        let load = |pickle: &[u8]| {
            let names: Vec<String> = (0..storages.len()).map(|index| format!("data/{index}")).collect();
            let mut records = vec![("data.pkl", pickle), ("byteorder", b"little")];
            records.extend(names.iter().zip(&storages).map(|(name, bytes)| (name.as_str(), bytes.as_slice())));
            std::fs::write(&path, zipped(&records)).unwrap();
            let reader = Reader::open(&engine, &Target::from(&path))?;
            let all: Vec<usize> = (0..reader.extents().len()).collect();
            let buffers = reader.load_buffers(&all);
            let memory = |buffer: &deepnvme_checkpoint::read::LoadBuffer| {
                Buffer::zeroed(buffer.bytes as usize).unwrap().into_region()
            };
            let targets: Vec<_> = buffers.into_iter().map(|buffer| (buffer.clone(), memory(&buffer))).collect();
            Arc::new(reader).start(&engine, targets)?.finish(Verify::Off, &Progress::default()).map(drop)
        };
        load(&whole).unwrap();
        for round in 0..MUTATIONS {
            guard.begin(round);
            let mut pickle = whole.clone();
            for _ in 0..=dice.u8(..3) {
                mutate_pickle(&mut pickle, &mut dice);
            }
            if let Err(error) = load(&pickle) {
                assert!(error.to_string().contains(&*path.to_string_lossy()), "mutation {round}: {error}");
                refused += 1;
            }
        }
        assert!(refused > MUTATIONS / 2, "{refused} were refused");
    });
}

/// Builds an archive of these records, with a valid directory and checksums.
fn zipped(records: &[(&str, &[u8])]) -> Vec<u8> {
    let specs: Vec<RecordSpec<'_>> =
        records.iter().map(|(name, bytes)| RecordSpec { name, bytes: bytes.len() as u64 }).collect();
    let plan = ArchivePlan::new("a", &specs).unwrap();
    let checksums: Vec<u32> =
        records.iter().map(|(_, bytes)| deepnvme_format::checksums::checksums_of(bytes).crc32).collect();
    let mut file = Vec::new();
    for (index, (_, bytes)) in records.iter().enumerate() {
        let place = &plan.records()[index];
        file.resize(place.header_offset as usize, 0);
        file.extend(plan.header(index, checksums[index]));
        file.resize(place.data_offset as usize, 0);
        file.extend(*bytes);
    }
    file.resize(plan.index_offset() as usize, 0);
    file.extend(plan.index(&checksums));
    file
}
