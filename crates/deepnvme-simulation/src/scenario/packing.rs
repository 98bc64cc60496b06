//! Packing a model: the new folder appears complete, or not at all.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use deepnvme_checkpoint::read::{FileMetadata, Reader};
use deepnvme_checkpoint::write::{Save, SaveOptions, Tensor};
use deepnvme_checkpoint::{Error, Progress, Result};
use deepnvme_file::stripe_set::MANIFEST_SUFFIX;
use deepnvme_file::{StripeSet, Target};
use deepnvme_format::Dtype;
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_io::{Engine, fs};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::thread;
use deepnvme_stream::pack::{EncodingMode, PACKED_NAME, PLAIN_NAME, PackOptions, Packer, tensors};
use deepnvme_testkit::rng::Rng;

use super::context::{
    CHECKPOINT_CHECK_ENGINE, Context, LAST_SAVE_ENGINE, LAST_SAVE_PROCESS, SETUP_ENGINE, SETUP_PROCESS,
};
use super::folders::make_folders;
use super::unproven::{has_unproven_name, may_be_foreign};
use super::users::{self, TakenNames};
use super::{content, payload};
use crate::world::SIMULATOR;

/// The most thread switches before a packer is cancelled.
const SWITCHES_MAX: u64 = 400;
/// Simulated crashes per seed. Packing makes many changes, and few seeds pack.
const CRASH_CHECKS: usize = 12;
/// Other files of the model.
const OTHER_FILES: [&str; 2] = ["config.json", "tokenizer.txt"];

struct Scenario {
    folder: PathBuf,
    model: Arc<Vec<(String, Dtype, Vec<u8>)>>,
    mode: EncodingMode,
    /// The folders that the weights are striped over.
    disks: Vec<PathBuf>,
    /// Whether a packer has reported success.
    is_packed: Mutex<bool>,
}

impl Scenario {
    fn source(&self) -> PathBuf {
        self.folder.join("source")
    }

    fn target(&self) -> PathBuf {
        self.folder.join("packed")
    }

    fn is_packed(&self) -> bool {
        *ignore_poison(self.is_packed.lock())
    }

    /// Copies the scenario as it is at this moment, to check a crash against it.
    fn snapshot(&self) -> Self {
        let Self { folder, model, mode, disks, .. } = self;
        let (folder, model, disks) = (folder.clone(), Arc::clone(model), disks.clone());
        Self { folder, model, mode: *mode, disks, is_packed: Mutex::new(self.is_packed()) }
    }
}

/// Runs the scenario.
pub(super) fn run(context: &Context) {
    let mut rng = context.rng(1);
    let mut disks = make_folders(context, 3);
    let folder = disks.remove(0);
    if !context.rng(5).chance(250) {
        disks.clear();
    }
    let mode = rng.pick(&[EncodingMode::Keep, EncodingMode::Lossless]);
    let scenario =
        Arc::new(Scenario { folder, model: Arc::new(draw_model(&mut rng)), mode, disks, is_packed: Mutex::new(false) });
    create_model(context, &scenario);
    for name in [".packed.deepnvme-tmp-1-0", "packed.bak"] {
        users::create_user_file(context, &scenario.folder.join(name));
    }
    let processes = rng.within(1..3) as u32;
    let is_cut = context.draw_crash(&mut rng, processes, 3, 1..250, 1..250);
    let running_scenario = Arc::clone(&scenario);
    context.check_crashes(1000, CRASH_CHECKS, move || {
        let at_crash = running_scenario.snapshot();
        move |context: &Context, is_cut| check_end(context, &Arc::new(at_crash.snapshot()), is_cut)
    });
    let mut running: Vec<_> = (1..=processes).map(|id| start_packer(context, &scenario, id, processes)).collect();
    if rng.chance(500) {
        running.push(users::start_name_taker(
            context,
            scenario.disks.iter().chain([&scenario.folder]).cloned().collect(),
            TakenNames::Private,
        ));
    }
    context.finish_running(running, is_cut);
    check_end(context, &scenario, is_cut);
}

/// Draws the tensors of a model. Weights are compressible, the others are not.
fn draw_model(rng: &mut Rng) -> Vec<(String, Dtype, Vec<u8>)> {
    let tensor = |(index, is_weight): (usize, bool), rng: &mut Rng| {
        let mut bytes = vec![0; 2 * rng.within(1..12_000) as usize];
        rng.fill(&mut bytes);
        if is_weight {
            // Few exponents, so they compress.
            bytes.iter_mut().skip(1).step_by(2).for_each(|byte| *byte = 0x3e + *byte % 4);
        }
        (format!("layers.{index}.weight"), if is_weight { Dtype::Bf16 } else { Dtype::U8 }, bytes)
    };
    (0..rng.within(1..5) as usize).map(|index| tensor((index, rng.chance(700)), rng)).collect()
}

/// Writes the model, without injected failures.
fn create_model(context: &Context, scenario: &Arc<Scenario>) {
    let failing = std::mem::take(&mut context.world.state().setup.failing_per_mille);
    let scenario_of_setup = Arc::clone(scenario);
    let process = context.process(SETUP_PROCESS, move |context| {
        let source = scenario_of_setup.source();
        let create = || -> Result<()> {
            fs::make_folder(&source, 0o777).map_err(|errno| deepnvme_io::Error::os("make a folder", errno))?;
            let tensor = |(name, dtype, bytes): &(String, Dtype, Vec<u8>)| Tensor {
                spec: TensorSpec { name: name.clone(), dtype: *dtype, shape: vec![bytes.len() as u64 / dtype.bytes()] },
                data: payload::region_with(bytes).region().into(),
            };
            let (path, tensors) =
                (source.join("model.safetensors"), scenario_of_setup.model.iter().map(tensor).collect());
            let save = Save::safetensors(&path, tensors, Vec::new(), SaveOptions::default())?;
            save.run(context.engine(SETUP_ENGINE)?, &Target::from(&path), Arc::default())?;
            fs::sync_folder(&scenario_of_setup.folder)?;
            Ok(())
        };
        if let Err(error) = create() {
            context.fail(format!("the model cannot be created: {error}"));
        }
    });
    context.join(vec![process]);
    for name in OTHER_FILES {
        users::create_user_file(context, &scenario.source().join(name));
    }
    context.world.reset_steps();
    context.world.state().setup.failing_per_mille = failing;
}

fn start_packer(context: &Context, scenario: &Arc<Scenario>, id: u32, processes: u32) -> thread::JoinHandle<()> {
    let scenario = Arc::clone(scenario);
    context.process(id, move |context| {
        let mut rng = context.rng(10 + u64::from(id));
        let Ok(engine) = context.engine(u64::from(id)) else { return };
        for _ in 0..rng.within(1..3) {
            let switches = rng.chance(300).then(|| rng.below(SWITCHES_MAX));
            match pack(&scenario, &engine, switches) {
                Ok(()) => *ignore_poison(scenario.is_packed.lock()) = true,
                Err(Error::Interrupted) if switches.is_some() => {}
                // Another process has created the folder.
                Err(_) if processes > 1 || scenario.is_packed() => {}
                Err(error) => {
                    if !context.world.is_dead(id) && context.world.state().setup.failing_per_mille == 0 {
                        context.fail(format!("packing failed without an injected failure: {error}"));
                    }
                }
            }
        }
    })
}

/// Packs the model. With `switches`, cancel it after that many thread switches.
fn pack(scenario: &Scenario, engine: &Arc<Engine>, switches: Option<u64>) -> Result<()> {
    let options = PackOptions { mode: scenario.mode, disks: scenario.disks.clone() };
    let packer = Packer::new(engine, &scenario.source(), &scenario.target(), options)?;
    let progress = Arc::new(Progress::default());
    let canceller = switches.map(|switches| {
        let progress = Arc::clone(&progress);
        thread::spawn(move || {
            (0..switches).for_each(|_| thread::yield_now());
            progress.stop();
        })
    });
    let packed = packer.run(&progress);
    if let Some(canceller) = canceller {
        let _ = canceller.join();
    }
    packed.map(drop)
}

fn check_end(context: &Context, scenario: &Arc<Scenario>, is_cut: bool) {
    check(context, scenario, "afterwards");
    if scenario.is_packed() && !fs::exists(&scenario.target()).unwrap_or(false) {
        context.fail(format!(
            "the packed model is gone{}",
            if is_cut { ", though the packer reported success" } else { "" }
        ));
    }
    pack_again(context, scenario);
    users::check_user_files(context);
}

/// Checks that an existing packed model is complete.
fn check(context: &Context, scenario: &Scenario, when: &str) {
    debug_assert_eq!(thread::process(), SIMULATOR, "nothing may fail here");
    if !fs::exists(&scenario.target()).unwrap_or(false) {
        return;
    }
    if let Err(problem) = verify(context, scenario, &scenario.target()) {
        context.fail(format!("{when}: the packed model exists, but {problem}"));
    }
}

fn verify(context: &Context, scenario: &Scenario, target: &Path) -> Result<(), String> {
    let engine = context.engine(CHECKPOINT_CHECK_ENGINE).map_err(|error| error.to_string())?;
    let names =
        [PACKED_NAME, PLAIN_NAME].into_iter().flat_map(|name| [name.into(), format!("{name}{MANIFEST_SUFFIX}")]);
    let path = names.map(|name| target.join(name)).find(|path| fs::exists(path).unwrap_or(false));
    let path = path.ok_or("it has no weights")?;
    let reader = Reader::open(&engine, &Target::from(&path)).map_err(|error| error.to_string())?;
    let FileMetadata::Safetensors { header } = reader.file_metadata() else {
        return Err("it is no safetensors file".into());
    };
    let packed = tensors(header, 0).map_err(|error| error.to_string())?;
    let packed_names: Vec<String> = packed.into_iter().map(|tensor| tensor.name).collect();
    let loaded = content::load(&engine, reader).map_err(|error| error.to_string())?;
    if loaded.len() != scenario.model.len() {
        return Err(format!("it has {} of {} tensors", loaded.len(), scenario.model.len()));
    }
    for (name, _, bytes) in scenario.model.iter() {
        let Some((_, found)) = loaded.iter().find(|(other, _)| other == name) else {
            return Err(format!("it lacks {name}"));
        };
        if !packed_names.contains(name) && found != bytes {
            return Err(format!("it has other bytes for {name}"));
        }
    }
    for name in OTHER_FILES {
        let source = fs::read_small(&scenario.source().join(name), 1 << 20).map_err(|error| error.to_string())?;
        let copy = fs::read_small(&target.join(name), 1 << 20);
        if copy.is_err() || copy.is_ok_and(|copy| copy != source) {
            return Err(format!("its {name} differs from the model's"));
        }
    }
    Ok(())
}

/// Packs once more without failures, if no packed model exists. That removes all private files.
fn pack_again(context: &Context, scenario: &Arc<Scenario>) {
    if fs::exists(&scenario.target()).unwrap_or(true) {
        return;
    }
    let again = Arc::clone(scenario);
    let process = context.process(LAST_SAVE_PROCESS, move |context| {
        let packed =
            context.engine(LAST_SAVE_ENGINE).map_err(Error::from).and_then(|engine| pack(&again, &engine, None));
        if let Err(error) = packed {
            context.fail(format!("packing without injected failures failed: {error}"));
        }
    });
    context.join(vec![process]);
    check(context, scenario, "after packing again");
    if !context.world.state().setup.has_locks {
        return;
    }
    let manifests = [PACKED_NAME, PLAIN_NAME].map(|name| scenario.target().join(format!("{name}{MANIFEST_SUFFIX}")));
    let sets = manifests.iter().filter_map(|path| StripeSet::from_manifest(path).ok());
    let parts: Vec<PathBuf> = sets.flat_map(|set| set.parts().to_vec()).collect();
    for path in scenario.disks.iter().flat_map(|disk| users::own_files_in(context, disk)) {
        if !parts.contains(&path) && !may_be_foreign(context, &path) {
            context.fail(format!("{} is left behind", path.display()));
        }
    }
    for path in users::own_files_in(context, &scenario.folder) {
        // A process may die before it renames a new folder to a name that proves its owner. Such a folder is empty.
        let is_new = has_unproven_name(&path);
        // A folder that contains a foreign file is kept.
        let is_kept = users::own_files_in(context, &path).iter().any(|inner| may_be_foreign(context, inner));
        if path != scenario.target() && path != scenario.source() && !is_new && !is_kept {
            context.fail(format!("{} is left behind", path.display()));
        }
    }
}
