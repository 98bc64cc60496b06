//! Packing a model: the new folder appears complete, or not at all.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use deepnvme_checkpoint::read::{Contents, Reader};
use deepnvme_checkpoint::write::{Save, SaveOptions, Tensor};
use deepnvme_checkpoint::{Error, Progress, Result};
use deepnvme_file::stripe_set::MANIFEST_SUFFIX;
use deepnvme_file::{StripeSet, Target};
use deepnvme_format::Dtype;
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_io::{Engine, fs};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::thread;
use deepnvme_stream::pack::{Mode, PACKED_NAME, PLAIN_NAME, PackOptions, Packer, tensors};
use deepnvme_testkit::rng::Rng;

use super::context::Context;
use super::folders::{is_unprovable, make_folders};
use super::users::{self, Taking};
use super::{content, payload};
use crate::world::OUTSIDE;

/// Thread switches before a packing is cancelled, at most.
const SWITCHES_MAX: u64 = 400;
/// Simulated crashes per seed. A packing makes many changes, and few seeds pack.
const CRASH_CHECKS: usize = 12;
/// Other files of the model.
const OTHERS: [&str; 2] = ["config.json", "tokenizer.txt"];

struct Play {
    folder: PathBuf,
    model: Arc<Vec<(String, Dtype, Vec<u8>)>>,
    mode: Mode,
    /// The folders that the weights are striped over.
    disks: Vec<PathBuf>,
    /// Whether a packing has reported success.
    is_packed: Mutex<bool>,
}

impl Play {
    fn source(&self) -> PathBuf {
        self.folder.join("source")
    }

    fn target(&self) -> PathBuf {
        self.folder.join("packed")
    }

    fn is_packed(&self) -> bool {
        *ignore_poison(self.is_packed.lock())
    }

    fn copy(&self) -> Self {
        let Self { folder, model, mode, disks, .. } = self;
        let (folder, model, disks) = (folder.clone(), Arc::clone(model), disks.clone());
        Self { folder, model, mode: *mode, disks, is_packed: Mutex::new(self.is_packed()) }
    }
}

/// Run the scenario.
pub(super) fn play(context: &Context) {
    let mut rng = context.rng(1);
    let mut disks = make_folders(context, 3);
    let folder = disks.remove(0);
    if !context.rng(5).chance(250) {
        disks.clear();
    }
    let mode = rng.pick(&[Mode::Keep, Mode::Lossless]);
    let play = Arc::new(Play { folder, model: Arc::new(model(&mut rng)), mode, disks, is_packed: Mutex::new(false) });
    begin(context, &play);
    for name in [".packed.deepnvme-tmp-1-0", "packed.bak"] {
        users::drop_file(context, &play.folder.join(name));
    }
    let processes = rng.within(1..3) as u32;
    let is_cut = {
        let mut state = context.world.state();
        match rng.below(3) {
            0 => state.setup.power_cut_at = Some(rng.within(1..250)),
            1 => state.setup.killed = Some((1 + rng.below(processes.into()) as u32, rng.within(1..250))),
            _ => {}
        }
        state.setup.power_cut_at.is_some()
    };
    let watched = Arc::clone(&play);
    context.watch(1000, CRASH_CHECKS, move || {
        let seen = watched.copy();
        move |context: &Context, is_cut| aftermath(context, &Arc::new(seen.copy()), is_cut)
    });
    let mut running: Vec<_> = (1..=processes).map(|id| packer(context, &play, id, processes)).collect();
    if rng.chance(500) {
        running.push(users::mimic(
            context,
            play.disks.iter().chain([&play.folder]).cloned().collect(),
            Taking::Private,
        ));
    }
    context.finish_running(running, is_cut);
    aftermath(context, &play, is_cut);
}

/// Create weights, of which some are compressible.
fn model(rng: &mut Rng) -> Vec<(String, Dtype, Vec<u8>)> {
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

/// Create the model.
fn begin(context: &Context, play: &Arc<Play>) {
    let failing = std::mem::take(&mut context.world.state().setup.failing);
    let first = Arc::clone(play);
    let process = context.process(400, move |context| {
        let source = first.source();
        let made = || -> Result<()> {
            fs::make_folder(&source, 0o777).map_err(|errno| deepnvme_io::Error::os("make a folder", errno))?;
            let tensor = |(name, dtype, bytes): &(String, Dtype, Vec<u8>)| Tensor {
                spec: TensorSpec { name: name.clone(), dtype: *dtype, shape: vec![bytes.len() as u64 / dtype.bytes()] },
                bytes: payload::holding(bytes).region().into(),
            };
            let (path, tensors) = (source.join("model.safetensors"), first.model.iter().map(tensor).collect());
            let save = Save::safetensors(&path, tensors, Vec::new(), SaveOptions::default())?;
            save.run(context.engine(99)?, &Target::from(&path), Arc::default())?;
            fs::sync_folder(&first.folder)?;
            Ok(())
        };
        if let Err(error) = made() {
            context.fail(format!("a model cannot be made: {error}"));
        }
    });
    context.join(vec![process]);
    for name in OTHERS {
        users::drop_file(context, &play.source().join(name));
    }
    context.world.forget_steps();
    context.world.state().setup.failing = failing;
}

fn packer(context: &Context, play: &Arc<Play>, id: u32, processes: u32) -> thread::JoinHandle<()> {
    let play = Arc::clone(play);
    context.process(id, move |context| {
        let mut rng = context.rng(10 + u64::from(id));
        let Ok(engine) = context.engine(u64::from(id)) else { return };
        for _ in 0..rng.within(1..3) {
            let rounds = rng.chance(300).then(|| rng.below(SWITCHES_MAX));
            match pack(&play, &engine, rounds) {
                Ok(()) => *ignore_poison(play.is_packed.lock()) = true,
                Err(Error::Interrupted) if rounds.is_some() => {}
                // Another process has made the folder.
                Err(_) if processes > 1 || play.is_packed() => {}
                Err(error) => {
                    if !context.world.is_dead(id) && context.world.state().setup.failing == 0 {
                        context.fail(format!("a packing failed without an injected failure: {error}"));
                    }
                }
            }
        }
    })
}

/// Pack the model. With `rounds`, cancel it after that many thread switches.
fn pack(play: &Play, engine: &Arc<Engine>, rounds: Option<u64>) -> Result<()> {
    let options = PackOptions { mode: play.mode, disks: play.disks.clone() };
    let packer = Packer::new(engine, &play.source(), &play.target(), options)?;
    let progress = Arc::new(Progress::default());
    let stopper = rounds.map(|rounds| {
        let progress = Arc::clone(&progress);
        thread::spawn(move || {
            (0..rounds).for_each(|_| thread::yield_now());
            progress.stop();
        })
    });
    let packed = packer.run(&progress);
    if let Some(stopper) = stopper {
        let _ = stopper.join();
    }
    packed.map(drop)
}

fn aftermath(context: &Context, play: &Arc<Play>, is_cut: bool) {
    check(context, play, "afterwards");
    if play.is_packed() && !fs::exists(&play.target()).unwrap_or(false) {
        context.fail(format!(
            "the packed model is gone{}",
            if is_cut { ", though its packing reported success" } else { "" }
        ));
    }
    recover(context, play);
    users::check_foreign(context);
}

/// Check that an existing packed model is complete.
fn check(context: &Context, play: &Play, when: &str) {
    debug_assert_eq!(thread::process(), OUTSIDE, "nothing may fail here");
    if !fs::exists(&play.target()).unwrap_or(false) {
        return;
    }
    if let Err(problem) = look(context, play, &play.target()) {
        context.fail(format!("{when}: the packed model exists, but {problem}"));
    }
}

fn look(context: &Context, play: &Play, target: &Path) -> Result<(), String> {
    let engine = context.engine(94).map_err(|error| error.to_string())?;
    let names =
        [PACKED_NAME, PLAIN_NAME].into_iter().flat_map(|name| [name.into(), format!("{name}{MANIFEST_SUFFIX}")]);
    let path = names.map(|name| target.join(name)).find(|path| fs::exists(path).unwrap_or(false));
    let path = path.ok_or("has no weights")?;
    let reader = Reader::open(&engine, &Target::from(&path)).map_err(|error| error.to_string())?;
    let Contents::Safetensors { header } = reader.contents() else { return Err("is no safetensors file".into()) };
    let packed = tensors(header, 0).map_err(|error| error.to_string())?;
    let packed: Vec<String> = packed.into_iter().map(|tensor| tensor.name).collect();
    let found = content::load(&engine, reader).map_err(|error| error.to_string())?;
    if found.len() != play.model.len() {
        return Err(format!("has {} of {} tensors", found.len(), play.model.len()));
    }
    for (name, _, bytes) in play.model.iter() {
        let Some((_, found)) = found.iter().find(|(other, _)| other == name) else {
            return Err(format!("lacks {name}"));
        };
        if !packed.contains(name) && found != bytes {
            return Err(format!("has other bytes for {name}"));
        }
    }
    for name in OTHERS {
        let source = fs::read_small(&play.source().join(name), 1 << 20).map_err(|error| error.to_string())?;
        let copy = fs::read_small(&target.join(name), 1 << 20);
        if copy.is_err() || copy.is_ok_and(|copy| copy != source) {
            return Err(format!("its {name} is another one"));
        }
    }
    Ok(())
}

/// Pack once more, without failures. That works if the folder is missing, and removes all private files.
fn recover(context: &Context, play: &Arc<Play>) {
    if fs::exists(&play.target()).unwrap_or(true) {
        return;
    }
    let again = Arc::clone(play);
    let process = context.process(500, move |context| {
        let packed = context.engine(96).map_err(Error::from).and_then(|engine| pack(&again, &engine, None));
        if let Err(error) = packed {
            context.fail(format!("a packing without failures failed: {error}"));
        }
    });
    context.join(vec![process]);
    check(context, play, "after the next packing");
    if !context.world.state().setup.has_locks {
        return;
    }
    let manifests = [PACKED_NAME, PLAIN_NAME].map(|name| play.target().join(format!("{name}{MANIFEST_SUFFIX}")));
    let sets = manifests.iter().filter_map(|path| StripeSet::from_manifest(path).ok());
    let parts: Vec<PathBuf> = sets.flat_map(|set| set.parts().to_vec()).collect();
    for path in play.disks.iter().flat_map(|disk| users::ours_in(context, disk)) {
        if !parts.contains(&path) && !is_unprovable(context, &path) {
            context.fail(format!("{} is left behind", path.display()));
        }
    }
    for path in users::ours_in(context, &play.folder) {
        // A new folder is always named, and its first name proves nothing. Such a folder is empty.
        let is_new = path.to_string_lossy().contains(".deepnvme-tmp-new-");
        // A folder with a foreign file also stays.
        let is_kept = users::ours_in(context, &path).iter().any(|inner| is_unprovable(context, inner));
        if path != play.target() && path != play.source() && !is_new && !is_kept {
            context.fail(format!("{} is left behind", path.display()));
        }
    }
}
