//! Checkpoints that several ranks write together, each a shard of one file or its own part file.
//!
//! The message rounds of the Python side are modelled here. The plan, shards, checksums, manifest and names are real
//! code.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_checkpoint::history::{Entry, HEAD_BYTES, History, Holder, Manifest, PARTS_LIST, Part, private_name};
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
use super::history::{self, Play};
use super::payload::Version;
use super::team::{Failure, Said, Team};
use super::users::{self, Taking};

/// Shards and parts start on blocks.
const BLOCK_BYTES: u64 = deepnvme_io::mem::PAGE_BYTES;

/// Run the scenario.
pub(super) fn play(context: &Context) {
    let mut rng = context.rng(1);
    let play = Arc::new(history::make(context, &mut rng, rng_content(context)));
    let ranks = rng.within(2..4) as usize;
    let team = Arc::new(Team::new(ranks));
    {
        let mut state = context.world.state();
        match rng.below(4) {
            0 => state.setup.power_cut_at = Some(rng.within(1..600)),
            1 | 2 => state.setup.killed = Some((1 + rng.below(ranks as u64) as u32, rng.within(1..250))),
            _ => {}
        }
    }
    let is_cut = context.world.state().setup.power_cut_at.is_some();
    history::watch(context, &play);
    let mut running: Vec<_> = (0..ranks).map(|rank| start(context, &play, &team, rank)).collect();
    if rng.chance(500) {
        running.push(users::mimic(context, vec![play.folder.clone()], Taking::Final));
    }
    history::finish(context, &play, running, is_cut);
}

fn rng_content(context: &Context) -> Content {
    context.rng(3).pick(&[Content::Archive, Content::Safetensors])
}

fn start(context: &Context, play: &Arc<Play>, team: &Arc<Team>, rank: usize) -> thread::JoinHandle<()> {
    let (play, team) = (Arc::clone(play), Arc::clone(team));
    context.process(1 + rank as u32, move |context| {
        let Ok(engine) = context.engine(1 + rank as u64) else { return };
        let history = History::new(play.folder.clone(), play.keep, true);
        // Random numbers shared by all ranks, and each rank's own.
        let (mut all, own) = (context.rng(20), context.rng(30 + rank as u64));
        let mut member = Member { context, play: &play, team: &team, engine, history, rank, rng: own };
        for version in 1..1 + all.within(1..4) {
            let step = all.within(1..6);
            let in_parts = all.chance(500);
            let durability = all.pick(&[Durability::Data, Durability::Full]);
            play.begin_save(version, step, durability);
            let outcome = member.save(version, step, in_parts, durability);
            play.end_save(version, outcome.is_ok());
            match outcome {
                Ok(()) => {}
                Err(Failure::Known(text)) => member.complain(&text),
                Err(Failure::Lost) => {
                    member.complain("another rank is gone");
                    break;
                }
            }
        }
        team.part();
    })
}

struct Member<'a> {
    context: &'a Context,
    play: &'a Play,
    team: &'a Team,
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
        self.path.with_file_name(format!("{whole}.part-{number:02}-of-{:02}", self.shards.len()))
    }

    fn part_names(&self) -> Vec<String> {
        let name = |number| self.part(number).file_name().unwrap_or_default().to_string_lossy().into_owned();
        (0..self.shards.len()).map(name).collect()
    }
}

impl Member<'_> {
    fn is_leader(&self) -> bool {
        self.rank == 0
    }

    fn complain(&self, text: &str) {
        let state = self.context.world.state();
        let is_excused = state.setup.failing > 0 || state.setup.killed.is_some() || state.setup.power_cut_at.is_some();
        drop(state);
        if !is_excused && !self.team.is_disturbed() {
            self.context.fail(format!("a save failed, though nothing else did: {text}"));
        }
    }

    fn agree(&mut self, work: impl FnOnce(&Self) -> Result<Said, Error>) -> Result<Vec<Said>, Failure> {
        if self.rng.chance(5) {
            // Interrupted where the others do not expect it.
            self.team.disturb();
            self.team.part();
            return Err(Failure::Lost);
        }
        self.team.agree(self.context, self.rank, || work(self))
    }

    fn save(&mut self, version: Version, step: u64, in_parts: bool, durability: Durability) -> Result<(), Failure> {
        let name = self.choose(step, in_parts)?;
        let mut saving = self.plan(&name, version, in_parts, durability)?;
        let written = self.write(&mut saving);
        let (saved, pending, parts) = match written {
            Ok(written) => written,
            Err(failure) => {
                drop(saving);
                self.history.free(&name);
                return Err(failure);
            }
        };
        let entry = Entry { parts, pending, ..history::entry_of(&name, step, saved) };
        self.commit(&entry, saving)
    }

    /// Agree on the name of a checkpoint.
    fn choose(&mut self, step: u64, in_parts: bool) -> Result<String, Failure> {
        let begun = self.agree(|this| {
            if !this.is_leader() {
                return Ok(Said::default());
            }
            let had = this.history.is_claimed();
            let claim = this.history.claim(&Holder::new("the ranks".into(), "together".into()), true)?;
            let is_news = !had || !claim.unlisted.is_empty();
            let text = if is_news { this.history.manifest().text() } else { String::new() };
            Ok(Said { names: this.history.names_of(step)?, ..Said::text(text) })
        })?;
        if !begun[0].text.is_empty() {
            self.agree(|this| {
                this.follow(&begun[0].text);
                Ok(Said::default())
            })?;
            self.settle()?;
        }
        let suffix = if self.play.content == Content::Archive { ".pt" } else { ".safetensors" };
        let suffix = format!("{suffix}{}", if in_parts { PARTS_LIST } else { "" });
        let chosen = self.agree(|this| match this.is_leader() {
            true => Ok(Said::text(this.history.reserve(step, &suffix, &begun[0].names)?)),
            false => Ok(Said::default()),
        })?;
        Ok(chosen[0].text.clone())
    }

    fn follow(&self, text: &str) {
        if !self.is_leader()
            && let Ok(manifest) = Manifest::parse(text.as_bytes())
        {
            self.history.follow(manifest);
        }
    }

    /// Rename files to their final names, and remove retired ones.
    fn settle(&mut self) -> Result<(), Failure> {
        let settled = self.agree(|this| {
            if !this.is_leader() {
                return Ok(Said::default());
            }
            let settled = this.history.settle();
            Ok(Said { names: settled.placed, other_names: settled.gone, ..Said::default() })
        })?;
        self.agree(|_| Ok(Said::default()))?;
        self.history.note(&settled[0].names, &settled[0].other_names);
        Ok(())
    }

    /// Plan the file, and create this rank's part of it.
    fn plan(
        &mut self,
        name: &str,
        version: Version,
        in_parts: bool,
        durability: Durability,
    ) -> Result<Saving, Failure> {
        let mut made = None;
        let saving = &mut made;
        let planned = self.agree(|this| {
            let path = this.play.folder.join(name);
            let whole = path.with_file_name(name.strip_suffix(PARTS_LIST).unwrap_or(name));
            let tensors = content::tensors(this.play.seed, version);
            let options = SaveOptions { durability, has_checksums: true, staging: None };
            let save = Arc::new(this.play.content.plan(&whole, &tensors, options)?);
            let shards = cut(save.bytes(), this.team.ranks());
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
            Ok(Said { number: saving.save.fingerprint(), ..Said::text(private) })
        });
        let planned = match planned {
            Ok(planned) => planned,
            Err(failure) => {
                self.history.free(name);
                return Err(failure);
            }
        };
        if planned.iter().any(|said| said.number != planned[0].number) {
            self.context.fail("ranks plan different files".into());
        }
        let Some(mut saving) = made else { return Err(Failure::Lost) };
        saving.temporary.clone_from(&planned[0].text);
        Ok(saving)
    }

    /// Write and sync this rank's shard. Returns all ranks' results, private names and parts.
    fn write(&mut self, saving: &mut Saving) -> Result<Written, Failure> {
        let mut shard = None;
        let begun = &mut shard;
        let tallies = self.agree(|this| {
            *begun = this.begin_shard(saving)?;
            Ok(Said { bytes: begun.as_ref().map(Shard::checksums), ..Said::default() })
        })?;
        let rank = self.rank;
        let finished = self.agree(|_| {
            let others = tallies.iter().enumerate().filter(|(other, _)| *other != rank);
            let others: Vec<Vec<u8>> = others.filter_map(|(_, said)| said.bytes.clone()).collect();
            let saved = shard.map(|shard| shard.finish(&others)).transpose()?;
            Ok(Said { saved, ..Said::default() })
        })?;
        let sealed = self.agree(|this| this.seal(saving))?;
        let Some(saved) = finished[0].saved else { return Err(Failure::Known("the leader wrote nothing".into())) };
        let mut pending = BTreeMap::new();
        let name = saving.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !saving.in_parts {
            pending.insert(name, sealed[0].text.clone());
            return Ok((saved, pending, Vec::new()));
        }
        pending.insert(name, sealed[0].other_text.clone());
        let mut parts = Vec::new();
        for ((file, shard), said) in saving.part_names().into_iter().zip(&saving.shards).zip(&sealed) {
            pending.insert(file.clone(), said.text.clone());
            let head_crc64 = said.names.first().cloned();
            let stat = fs::stat_link(&saving.path.with_file_name(&said.text));
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

    /// Prepare the files for their final names.
    fn seal(&self, saving: &mut Saving) -> Result<Said, Error> {
        let mut said = Said::default();
        if let Some(new) = &saving.new {
            new.take_mode()?;
            said.text = private_name(new).unwrap_or_default();
            if saving.in_parts {
                let shard = &saving.shards[self.rank];
                said.names.push(head_crc64(new, (shard.end - shard.start).min(HEAD_BYTES))?);
            }
        }
        if self.is_leader() && saving.in_parts {
            let stripe_bytes = saving.shards[0].end.next_multiple_of(BLOCK_BYTES);
            let parts = saving.part_names();
            let list = StripeSet::new(parts.into_iter().map(Into::into).collect(), stripe_bytes)?.to_list()?;
            let new = Replacement::new(&Target::Path(saving.path.clone()))?;
            fill(&new, list.as_bytes())?;
            new.take_mode()?;
            said.other_text = private_name(&new).unwrap_or_default();
            saving.list = Some(new);
        }
        Ok(said)
    }

    /// Publish the checkpoint.
    fn commit(&mut self, entry: &Entry, saving: Saving) -> Result<(), Failure> {
        let mut failed = None;
        let refused = &mut failed;
        let published = self.agree(|this| {
            if !this.is_leader() {
                return Ok(Said::default());
            }
            if let Err(error) = this.history.publish(entry) {
                if this.history.counts(&entry.file) == Some(false) {
                    return Err(error);
                }
                *refused = Some(error);
            }
            Ok(Said::text(this.history.manifest().text()))
        });
        self.history.free(&entry.file);
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
        self.agree(|_| failed.map_or_else(|| Ok(Said::default()), Err)).map(drop)
    }
}

/// Split the file evenly into blocks for the ranks. There may be fewer shards than ranks.
fn cut(bytes: u64, ranks: usize) -> Vec<Range<u64>> {
    let share_bytes = bytes.div_ceil(BLOCK_BYTES).div_ceil(ranks as u64).max(1) * BLOCK_BYTES;
    (0..ranks as u64)
        .map(|rank| rank * share_bytes..((rank + 1) * share_bytes).min(bytes))
        .filter(|shard| shard.start < shard.end)
        .collect()
}

fn fill(new: &Replacement, bytes: &[u8]) -> Result<(), IoError> {
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
