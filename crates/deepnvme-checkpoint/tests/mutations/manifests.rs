//! Mutate the manifests and lock files of checkpoint folders, and the indexes of distributed checkpoints.

use std::path::{Path, PathBuf};

use deepnvme_checkpoint::history::{History, Holder, MANIFEST};
use deepnvme_testkit::guard::run_limited;
use deepnvme_testkit::{fuzz_targets, text_mutations};
use serde_json::{Value, json};

use crate::attack::MUTATIONS;
use crate::common::random;
use crate::fuzz_bodies;
use crate::json::mutate;

/// No manifest removes a file other than a checkpoint that it retires, and errors name the manifest.
#[test]
fn manifests() {
    run_limited("manifests::manifests", |guard| {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let foreign = ["notes.txt", "step-00000009.pt", ".step-00000001.pt.deepnvme-tmp-x", "deepnvme.json"];
        let own = ["step-00000001.pt", "step-00000002.pt", "step-00000003.pt"];
        let contents: Vec<Vec<u8>> = (0..own.len()).map(|index| random(200, index as u64)).collect();
        let entry = |index: usize| {
            let crc64 = deepnvme_format::checksums::checksums_of(&contents[index][100..]).crc64;
            json!({ "file": own[index], "step": index + 1, "nbytes": 200, "time": "2026-01-01", "index_offset": 100,
                    "index_nbytes": 100, "index_crc64": format!("{crc64:016x}"), "torch": "2", "deepnvme": "0" })
        };
        let mut parts = entry(1);
        parts["parts"] = json!([{ "file": own[1], "nbytes": 200, "host": "a", "head_crc64": "0123456789abcdef" }]);
        parts["pending"] = json!({ own[1]: format!(".{}.deepnvme-tmp-7-x", own[1]) });
        let before = json!({ "version": 2, "checkpoints": [entry(0), parts], "retired": [entry(2)] });
        for name in foreign {
            std::fs::write(path(name), b"precious").unwrap();
        }
        let (mut dice, mut refused) = (fastrand::Rng::with_seed(17), 0);
        for round in 0..MUTATIONS {
            guard.begin(round);
            for (name, bytes) in own.iter().zip(&contents).filter(|(name, _)| !path(name).exists()) {
                std::fs::write(path(name), bytes).unwrap();
            }
            let mut document = before.clone();
            for _ in 0..=dice.u8(..3) {
                mutate(&mut document, &mut dice);
            }
            let mut text = document.to_string();
            if dice.u8(..10) == 0 {
                text.truncate(text.floor_char_boundary(dice.usize(..=text.len())));
            }
            std::fs::write(path(MANIFEST), &text).unwrap();
            let history = History::new(folder.path().to_path_buf(), None, false);
            let claimed = history.read().and_then(|_| history.claim(&Holder::new("x".into(), "y".into()), true));
            match claimed {
                Ok(_) => drop(history.settle()),
                Err(error) => {
                    assert!(error.to_string().contains(MANIFEST), "mutation {round}: {error}");
                    refused += 1;
                }
            }
            let retired = |name: &str| document["retired"].to_string().contains(name);
            for name in own.iter().filter(|name| !path(name).exists()) {
                assert!(retired(name), "mutation {round} has removed {name}: {document}");
            }
            for name in foreign {
                assert_eq!(std::fs::read(path(name)).unwrap(), b"precious", "mutation {round}: {document}");
            }
        }
        assert!(refused > MUTATIONS / 4, "{refused} were refused");
    });
}

/// Runs the fuzz body over its seeds and mutations of them.
#[test]
fn manifest_texts() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/history");
    let mut seeds: Vec<PathBuf> = std::fs::read_dir(seeds).unwrap().map(|entry| entry.unwrap().path()).collect();
    seeds.sort();
    let seeds: Vec<Vec<u8>> = seeds.iter().map(|path| std::fs::read(path).unwrap()).collect();
    seeds.iter().for_each(|seed| fuzz_bodies::history(seed));
    let documents: Vec<Value> = seeds.iter().filter_map(|seed| serde_json::from_slice(seed).ok()).collect();
    let mut dice = fastrand::Rng::with_seed(19);
    for round in 0..4 * MUTATIONS as usize {
        let mut document = documents[round % documents.len()].clone();
        for _ in 0..=dice.u8(..3) {
            mutate(&mut document, &mut dice);
        }
        fuzz_bodies::history(document.to_string().as_bytes());
    }
}

fuzz_targets! {
    text_mutations::FILE_MUTATIONS, text_mutations::mutate;
    indexes_of_distributed_checkpoints: "shards", fuzz_bodies::shards;
}

fuzz_targets! {
    text_mutations::mutate;
    lock_files: "lock", fuzz_bodies::lock;
}
