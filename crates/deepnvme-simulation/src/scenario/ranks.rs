//! Checkpoints that several ranks write together, each a shard of one file or its own part file.
//!
//! The message rounds of the Python side are modelled here. The plan, shards, checksums, manifest and names are real
//! code.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_checkpoint::history::{
    HEAD_BYTES, History, Holder, Manifest, ManifestEntry, PARTS_LIST, Part, private_name,
};
use deepnvme_checkpoint::write::{Save, SaveOptions, Saved, Shard, create};
use deepnvme_checkpoint::{Error, Progress};
use deepnvme_file::{Replacement, StripeSet, Target};
use deepnvme_format::checksums::Hasher;
use deepnvme_io::fs::{self, OFlags};
use deepnvme_io::{DirectMode, Durability, Engine, Error as IoError, OpenOptions};
use deepnvme_simulation_runtime::thread;
use deepnvme_testkit::rng::Rng;

use super::content::{self, Content};
use super::context::Context;
use super::history::{self, Scenario};
use super::payload::Version;
use super::process_group::{Failure, Message, ProcessGroup};
use super::users::{self, TakenNames};

/// Shards and parts start on blocks.
const PAGE_BYTES: u64 = deepnvme_io::mem::PAGE_BYTES;

/// Runs the scenario.
pub(super) fn run(context: &Context) {
    let mut rng = context.rng(1);
    let scenario = Arc::new(history::make(context, &mut rng, draw_content(context)));
    let ranks = rng.within(2..4) as usize;
    let group = Arc::new(ProcessGroup::new(ranks));
    {
        let mut state = context.world.state();
        match rng.below(4) {
            0 => state.setup.power_cut_at = Some(rng.within(1..600)),
            1 | 2 => state.setup.killed = Some((1 + rng.below(ranks as u64) as u32, rng.within(1..250))),
            _ => {}
        }
    }
    let is_cut = context.world.state().setup.power_cut_at.is_some();
    history::check_crashes(context, &scenario);
    let mut running: Vec<_> = (0..ranks).map(|rank| start(context, &scenario, &group, rank)).collect();
    if rng.chance(500) {
        running.push(users::start_name_taker(context, vec![scenario.folder.clone()], TakenNames::Final));
    }
    history::finish(context, &scenario, running, is_cut);
}

fn draw_content(context: &Context) -> Content {
    context.rng(3).pick(&[Content::Archive, Content::Safetensors])
}

fn start(
    context: &Context,
    scenario: &Arc<Scenario>,
    group: &Arc<ProcessGroup>,
    rank: usize,
) -> thread::JoinHandle<()> {
    let (scenario, group) = (Arc::clone(scenario), Arc::clone(group));
    context.process(1 + rank as u32, move |context| {
        let Ok(engine) = context.engine(1 + rank as u64) else { return };
        let history = History::new(scenario.folder.clone(), scenario.keep, true);
        // Random numbers shared by all ranks, and each rank's own.
        let (mut all, own) = (context.rng(20), context.rng(30 + rank as u64));
        let mut process = RankProcess { context, scenario: &scenario, group: &group, engine, history, rank, rng: own };
        for version in 1..1 + all.within(1..4) {
            let step = all.within(1..6);
            let in_parts = all.chance(500);
            let durability = all.pick(&[Durability::Data, Durability::Full]);
            scenario.begin_save(version, step, durability);
            let outcome = process.save(version, step, in_parts, durability);
            scenario.end_save(version, outcome.is_ok());
            match outcome {
                Ok(()) => {}
                Err(Failure::Known(text)) => process.report_failure(&text),
                Err(Failure::Lost) => {
                    process.report_failure("another rank is gone");
                    break;
                }
            }
        }
        group.leave();
    })
}

struct RankProcess<'a> {
    context: &'a Context,
    scenario: &'a Scenario,
    group: &'a ProcessGroup,
    engine: Arc<Engine>,
    history: History,
    rank: usize,
    rng: Rng,
}

/// Result of all ranks' writes: sizes, private names and parts.
type Written = (Saved, BTreeMap<String, String>, Vec<Part>);

/// A save in progress in this rank.
struct Saving {
    path: PathBuf,
    in_parts: bool,
    save: Arc<Save>,
    shards: Vec<Range<u64>>,
    new: Option<Replacement>,
    list: Option<Replacement>,
    /// Private name of the one file.
    temporary: String,
}

impl Saving {
    fn keep(self) {
        self.new.into_iter().chain(self.list).for_each(Replacement::keep);
    }

    fn part(&self, number: usize) -> PathBuf {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let whole = name.strip_suffix(PARTS_LIST).unwrap_or(&name);
        let parts = format!("{:02}", self.shards.len());
        self.path.with_file_name(format!("{whole}.part-{number:0width$}-of-{parts}", width = parts.len()))
    }

    fn part_names(&self) -> Vec<String> {
        let name = |number| self.part(number).file_name().unwrap_or_default().to_string_lossy().into_owned();
        (0..self.shards.len()).map(name).collect()
    }
}

impl RankProcess<'_> {
    fn is_leader(&self) -> bool {
        self.rank == 0
    }

    fn report_failure(&self, text: &str) {
        let state = self.context.world.state();
        let is_excused =
            state.setup.failing_per_mille > 0 || state.setup.killed.is_some() || state.setup.power_cut_at.is_some();
        drop(state);
        if !is_excused && !self.group.is_interrupted() {
            self.context.fail(format!("a save failed, though nothing else did: {text}"));
        }
    }

    fn gather(&mut self, work: impl FnOnce(&Self) -> Result<Message, Error>) -> Result<Vec<Message>, Failure> {
        if self.rng.chance(5) {
            // Interrupted where the others do not expect it.
            self.group.mark_interrupted();
            self.group.leave();
            return Err(Failure::Lost);
        }
        self.group.gather(self.context, self.rank, || work(self))
    }

    fn save(&mut self, version: Version, step: u64, in_parts: bool, durability: Durability) -> Result<(), Failure> {
        let name = self.choose_name(step, in_parts)?;
        let mut saving = self.plan(&name, version, in_parts, durability)?;
        let written = self.write(&mut saving);
        let (saved, pending, parts) = match written {
            Ok(written) => written,
            Err(failure) => {
                drop(saving);
                self.history.release_name(&name);
                return Err(failure);
            }
        };
        let entry = ManifestEntry { parts, pending, ..history::entry_of(&name, step, saved) };
        self.commit(&entry, saving)
    }

    /// Agrees on the name of a checkpoint.
    fn choose_name(&mut self, step: u64, in_parts: bool) -> Result<String, Failure> {
        let begun = self.gather(|this| {
            if !this.is_leader() {
                return Ok(Message::default());
            }
            let had = this.history.is_claimed();
            let claim = this.history.claim(&Holder::new("the ranks".into(), "together".into()), true)?;
            let is_news = !had || !claim.unlisted.is_empty();
            let text = if is_news { this.history.manifest().text() } else { String::new() };
            Ok(Message { names: this.history.names_of(step)?, ..Message::text(text) })
        })?;
        if !begun[0].text.is_empty() {
            self.gather(|this| {
                this.follow(&begun[0].text);
                Ok(Message::default())
            })?;
            self.settle()?;
        }
        let suffix = if self.scenario.content == Content::Archive { ".pt" } else { ".safetensors" };
        let suffix = format!("{suffix}{}", if in_parts { PARTS_LIST } else { "" });
        let chosen = self.gather(|this| match this.is_leader() {
            true => Ok(Message::text(this.history.reserve(step, &suffix, &begun[0].names)?)),
            false => Ok(Message::default()),
        })?;
        Ok(chosen[0].text.clone())
    }

    fn follow(&self, text: &str) {
        if !self.is_leader()
            && let Ok(manifest) = Manifest::parse(text.as_bytes())
        {
            self.history.adopt_shared(manifest);
        }
    }

    /// Renames files to their final names, and removes retired ones.
    fn settle(&mut self) -> Result<(), Failure> {
        let settled = self.gather(|this| {
            if !this.is_leader() {
                return Ok(Message::default());
            }
            let settled = this.history.settle();
            Ok(Message { names: settled.placed, other_names: settled.gone, ..Message::default() })
        })?;
        self.gather(|_| Ok(Message::default()))?;
        self.history.record_settled(&settled[0].names, &settled[0].other_names);
        Ok(())
    }

    /// Plans the file, and creates this rank's part of it.
    fn plan(
        &mut self,
        name: &str,
        version: Version,
        in_parts: bool,
        durability: Durability,
    ) -> Result<Saving, Failure> {
        let mut made = None;
        let saving = &mut made;
        let planned = self.gather(|this| {
            let path = this.scenario.folder.join(name);
            let whole = path.with_file_name(name.strip_suffix(PARTS_LIST).unwrap_or(name));
            let tensors = content::tensors(this.scenario.seed, version);
            let options = SaveOptions { durability, has_checksums: true, staging: None };
            let save = Arc::new(this.scenario.content.plan(&whole, &tensors, options)?);
            let shards = shard_ranges(save.bytes(), this.group.ranks());
            let (new, list, temporary) = (None, None, String::new());
            let saving = saving.insert(Saving { path, in_parts, save, shards, new, list, temporary });
            if in_parts {
                if let Some(shard) = saving.shards.get(this.rank) {
                    let target = Target::from(saving.part(this.rank));
                    saving.new = Some(create(&this.engine, &target, shard.end - shard.start)?.0);
                }
            } else if this.is_leader() {
                saving.new = Some(create(&this.engine, &Target::from(&saving.path), saving.save.bytes())?.0);
            }
            let private = saving.new.as_ref().and_then(private_name).unwrap_or_default();
            Ok(Message { number: saving.save.layout_crc64(), ..Message::text(private) })
        });
        let planned = match planned {
            Ok(planned) => planned,
            Err(failure) => {
                self.history.release_name(name);
                return Err(failure);
            }
        };
        if planned.iter().any(|message| message.number != planned[0].number) {
            self.context.fail("ranks plan different files".into());
        }
        let Some(mut saving) = made else { return Err(Failure::Lost) };
        saving.temporary.clone_from(&planned[0].text);
        Ok(saving)
    }

    /// Writes and syncs this rank's shard. Returns all ranks' results, private names and parts.
    fn write(&mut self, saving: &mut Saving) -> Result<Written, Failure> {
        let mut shard = None;
        let begun = &mut shard;
        let checksums = self.gather(|this| {
            *begun = this.begin_shard(saving)?;
            Ok(Message { bytes: begun.as_ref().map(Shard::checksums), ..Message::default() })
        })?;
        let rank = self.rank;
        let finished = self.gather(|_| {
            let others = checksums.iter().enumerate().filter(|(other, _)| *other != rank);
            let others: Vec<Vec<u8>> = others.filter_map(|(_, message)| message.bytes.clone()).collect();
            let saved = shard.map(|shard| shard.finish(&others)).transpose()?;
            Ok(Message { saved, ..Message::default() })
        })?;
        let finished_files = self.gather(|this| this.finish_files(saving))?;
        let Some(saved) = finished[0].saved else { return Err(Failure::Known("the leader wrote nothing".into())) };
        let mut pending = BTreeMap::new();
        let name = saving.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !saving.in_parts {
            pending.insert(name, finished_files[0].text.clone());
            return Ok((saved, pending, Vec::new()));
        }
        pending.insert(name, finished_files[0].other_text.clone());
        let mut parts = Vec::new();
        for ((file, shard), message) in saving.part_names().into_iter().zip(&saving.shards).zip(&finished_files) {
            pending.insert(file.clone(), message.text.clone());
            let head_crc64 = message.names.first().cloned();
            let stat = fs::stat_link(&saving.path.with_file_name(&message.text));
            let written_ns = stat.ok().map(|stat| stat.modified_ns as i64);
            let nbytes = shard.end - shard.start;
            parts.push(Part { file, nbytes, host: "here".into(), head_crc64, written_ns });
        }
        Ok((saved, pending, parts))
    }

    fn begin_shard(&self, saving: &Saving) -> Result<Option<Shard>, Error> {
        let Some(range) = saving.shards.get(self.rank).cloned() else { return Ok(None) };
        let (target, base) = match &saving.new {
            Some(new) => (new.temporary(), if saving.in_parts { range.start } else { 0 }),
            None => (Target::from(saving.path.with_file_name(&saving.temporary)), 0),
        };
        let file = deepnvme_file::open(&target, OpenOptions::to_fill(DirectMode::Preferred))?;
        let (save, engine) = (Arc::clone(&saving.save), Arc::clone(&self.engine));
        save.start_shard(engine, file, range, base, Arc::<Progress>::default()).map(Some)
    }

    /// Prepares the files for their final names.
    fn finish_files(&self, saving: &mut Saving) -> Result<Message, Error> {
        let mut message = Message::default();
        if let Some(new) = &saving.new {
            new.take_mode()?;
            message.text = private_name(new).unwrap_or_default();
            if saving.in_parts {
                let shard = &saving.shards[self.rank];
                message.names.push(head_crc64(new, (shard.end - shard.start).min(HEAD_BYTES))?);
            }
        }
        if self.is_leader() && saving.in_parts {
            let stripe_bytes = saving.shards[0].end.next_multiple_of(PAGE_BYTES);
            let parts = saving.part_names();
            let list = StripeSet::new(parts.into_iter().map(Into::into).collect(), stripe_bytes)?.to_list()?;
            let new = Replacement::new(&Target::Path(saving.path.clone()))?;
            write_whole(&new, list.as_bytes())?;
            new.take_mode()?;
            message.other_text = private_name(&new).unwrap_or_default();
            saving.list = Some(new);
        }
        Ok(message)
    }

    /// Publishes the checkpoint.
    fn commit(&mut self, entry: &ManifestEntry, saving: Saving) -> Result<(), Failure> {
        let mut failed = None;
        let refused = &mut failed;
        let published = self.gather(|this| {
            if !this.is_leader() {
                return Ok(Message::default());
            }
            if let Err(error) = this.history.publish(entry, &[]) {
                if this.history.is_committed(&entry.file) == Some(false) {
                    return Err(error);
                }
                *refused = Some(error);
            }
            Ok(Message::text(this.history.manifest().text()))
        });
        self.history.release_name(&entry.file);
        let text = match published {
            Ok(published) => published[0].text.clone(),
            Err(failure) => {
                // If the others are unreachable, the leader may still publish it.
                if let Failure::Lost = failure {
                    saving.keep();
                }
                return Err(failure);
            }
        };
        saving.keep();
        self.follow(&text);
        self.settle()?;
        self.gather(|_| failed.map_or_else(|| Ok(Message::default()), Err)).map(drop)
    }
}

/// Splits the file into shards of whole pages, one for each rank. There may be fewer shards than ranks.
fn shard_ranges(bytes: u64, ranks: usize) -> Vec<Range<u64>> {
    let shard_bytes = bytes.div_ceil(PAGE_BYTES).div_ceil(ranks as u64).max(1) * PAGE_BYTES;
    (0..ranks as u64)
        .map(|rank| rank * shard_bytes..((rank + 1) * shard_bytes).min(bytes))
        .filter(|shard| shard.start < shard.end)
        .collect()
}

fn write_whole(new: &Replacement, bytes: &[u8]) -> Result<(), IoError> {
    let path = new.temporary().path();
    let written = fs::open(&path, OFlags::WRONLY, 0).and_then(|file| {
        fs::write_all(file.as_fd(), bytes)?;
        fs::sync(file.as_fd())
    });
    written.map_err(|errno| IoError::os("write", errno).at_path(path))
}

fn head_crc64(new: &Replacement, bytes: u64) -> Result<String, IoError> {
    let path = new.temporary().path();
    let mut head = vec![0; bytes as usize];
    let read = fs::open(&path, OFlags::RDONLY, 0).and_then(|file| {
        let mut done = 0;
        while done < head.len() {
            match fs::read_at(file.as_fd(), &mut head[done..], done as u64)? {
                0 => break,
                count => done += count,
            }
        }
        Ok(())
    });
    read.map_err(|errno| IoError::os("read", errno).at_path(path))?;
    let mut hasher = Hasher::default();
    hasher.update(&head);
    Ok(format!("{:016x}", hasher.finish().crc64))
}
