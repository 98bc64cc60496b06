//! Files of others in the folder of a killed save.

use std::path::Path;

use deepnvme_checkpoint::history::{self, History, Holder};
use deepnvme_file::replace::{Member, PrivateFolder, SetReplacement};
use deepnvme_io::fs;
use deepnvme_simulation::run::script;
use deepnvme_simulation::world::FIRST_USER;
use deepnvme_simulation_runtime::thread::in_process;
use serde_json::json;

use crate::setup::{FOLDER, begin, commit, names, save, setup, write};

/// A killed save's shard folder: files of the save are removed, and all others stay, whatever their names.
#[test]
fn foreign_files_in_the_folder_of_a_killed_save_stay() {
    const FOREIGN: [&str; 4] = [
        "notes.txt",
        ".deepnvme.json.deepnvme-tmp-1-0-0011223344556677",
        "shard-00000-0.safetensors",
        "deepnvme.json.bak",
    ];
    let make = |is_committed: bool| {
        let folder = history::PrivateFolder::new(Path::new(FOLDER), "step-00000001").unwrap();
        let index = folder.path().join("deepnvme.json");
        let member = |number| Member { prefix: folder.path().join(format!("shard-{number}-")), suffix: ".bin".into() };
        let new = SetReplacement::begin(&index, &[member(0), member(1)], &["deepnvme.owned"]).unwrap();
        new.members().for_each(|path| write(path, "shard", false).unwrap());
        let left = if is_committed { new.commit(json!({})).map(|_| None).unwrap() } else { Some(new) };
        (folder, left)
    };
    for (is_committed, foreign) in [(false, 0), (true, 0), (false, FOREIGN.len()), (true, FOREIGN.len())] {
        let report = script(5, &setup(true), move |context| {
            let (folder, new) = in_process(1, || make(is_committed));
            let path = folder.path().to_path_buf();
            in_process(FIRST_USER, || {
                FOREIGN[..foreign].iter().for_each(|name| write(&path.join(name), "theirs", true).unwrap());
            });
            // The process dies: its remaining calls have no effect.
            context.world.fail_calls(0..u64::MAX);
            in_process(1, || drop((new, folder)));
            context.world.stop_faults();
            assert!(fs::entries(&path).unwrap().len() > foreign, "the killed save left something");
            let history = History::new(FOLDER.into(), Some(1), true);
            in_process(2, || history.claim(&Holder::new("a test".into(), "group".into()), true).map(drop).unwrap());
            let mut left: Vec<_> = fs::entries(&path).unwrap_or_default();
            left.sort();
            let mut expected: Vec<_> = FOREIGN[..foreign].to_vec();
            expected.sort_unstable();
            assert_eq!(left, expected, "committed {is_committed}");
            assert_eq!(fs::exists(&path).unwrap(), foreign > 0, "an empty folder goes");
        });
        assert!(report.failures.is_empty(), "committed {is_committed}, {foreign} foreign: {:#?}", report.failures);
    }
}
