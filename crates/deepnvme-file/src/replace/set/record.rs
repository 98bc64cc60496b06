//! The texts of an index and an intent: which files they list, and which are their own.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use deepnvme_format::file_list::{self, SealState};
use deepnvme_io::fs::{self, Stat};
use deepnvme_io::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use serde_json::ser::Formatter;
use serde_json::{Map, Value};

use super::identity::{folder_mark, name_of};

/// Maximum size of an index.
const INDEX_BYTES_MAX: u64 = 256 << 20;

pub(super) const INTENT: &str = "deepnvme-intent";

/// Hexadecimal digits of a token.
pub(super) const TOKEN_DIGITS: usize = 32;

/// The names and marks of future members.
#[derive(Serialize, Deserialize, Default, Debug)]
pub(super) struct Intent {
    pub(super) format: String,
    pub(super) version: u32,
    pub(super) members: Vec<IntendedMember>,
}

/// A future member of a set. Without a mark, only its temporaries can be removed: their names state their own.
#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(from = "(PathBuf, Option<String>)", into = "(PathBuf, Option<String>)")]
pub(super) struct IntendedMember {
    pub(super) path: PathBuf,
    pub(super) mark: Option<String>,
}

impl From<(PathBuf, Option<String>)> for IntendedMember {
    fn from((path, mark): (PathBuf, Option<String>)) -> Self {
        Self { path, mark }
    }
}

impl From<IntendedMember> for (PathBuf, Option<String>) {
    fn from(member: IntendedMember) -> Self {
        (member.path, member.mark)
    }
}

/// A member of a set, as the record of its index states it.
#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(from = "(PathBuf, String)", into = "(PathBuf, String)")]
pub(super) struct RecordedMember {
    pub(super) path: PathBuf,
    pub(super) mark: String,
}

impl From<(PathBuf, String)> for RecordedMember {
    fn from((path, mark): (PathBuf, String)) -> Self {
        Self { path, mark }
    }
}

impl From<RecordedMember> for (PathBuf, String) {
    fn from(member: RecordedMember) -> Self {
        (member.path, member.mark)
    }
}

/// The record in an index of the files that it owns.
#[derive(Serialize, Deserialize, Default, Debug)]
pub(super) struct Record {
    /// The mark of the index itself.
    pub(super) index: String,
    /// Its file name.
    #[serde(default)]
    pub(super) name: String,
    /// The mark of its folder.
    #[serde(default)]
    pub(super) folder: String,
    /// Contained in the names of all members.
    pub(super) token: String,
    pub(super) members: Vec<RecordedMember>,
    /// Members of the replaced index. They are removed unless that failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) replaces: Vec<RecordedMember>,
}

impl Record {
    /// Returns whether the index with this record is the one that was written under this name. An index with a single
    /// name is, even after it was renamed.
    pub(super) fn is_at(&self, path: &Path, stat: &Stat) -> bool {
        stat.links == 1
            || (self.name == name_of(path).escape_ascii().to_string()
                && folder_mark(path).as_ref() == Some(&self.folder))
    }
}

/// Returns the members that an intent lists. An index that did not get its name counts as an intent.
pub(super) fn intended_members(value: &Value, record_at: &[String], index: &Path) -> Vec<IntendedMember> {
    if let Some(record) = find_record(value, record_at).and_then(|record| Record::deserialize(record).ok()) {
        // Those of a retired set have the tokens of several saves.
        let members = resolve_paths(record.members, index).into_iter().filter(|member| has_any_token(&member.path));
        return members.map(|RecordedMember { path, mark }| IntendedMember { path, mark: Some(mark) }).collect();
    }
    match Intent::deserialize(value) {
        Ok(intent) if intent.format == INTENT && intent.version == 1 => {
            let is_ours = |member: &IntendedMember| has_any_token(&member.path) && is_recorded_form(&member.path);
            let members = intent.members.into_iter().filter(is_ours);
            members.map(|member| IntendedMember { path: fs::folder_of(index).join(member.path), ..member }).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the form of a path in the records of an index.
pub(super) fn recorded_path(path: &Path, index: &Path) -> PathBuf {
    match path.file_name() {
        Some(name) if fs::folder_of(path) == fs::folder_of(index) => name.into(),
        _ => path.to_path_buf(),
    }
}

/// Returns whether [`recorded_path`] writes a path like this one.
fn is_recorded_form(path: &Path) -> bool {
    path.is_absolute() || path.components().eq([Component::Normal(path.as_os_str())])
}

/// Resolves the paths in the records of an index: file names in its folder, or absolute paths. Other paths were not
/// written by this library, and may lead out of the folder.
pub(super) fn resolve_paths(members: Vec<RecordedMember>, index: &Path) -> Vec<RecordedMember> {
    let ours = members.into_iter().filter(|member| is_recorded_form(&member.path));
    ours.map(|member| RecordedMember { path: fs::folder_of(index).join(member.path), ..member }).collect()
}

/// Returns all files that an index lists, owned or not: the parts of a stripe manifest, or the values of a weight map.
pub(super) fn listed_files(index: &Value, path: &Path) -> Vec<PathBuf> {
    let names = match (index.get("parts"), index.get("weight_map")) {
        (Some(Value::Array(parts)), _) => parts.iter().filter_map(Value::as_str).collect::<HashSet<_>>(),
        (_, Some(Value::Object(map))) => map.values().filter_map(Value::as_str).collect(),
        _ => HashSet::new(),
    };
    let mut paths: Vec<PathBuf> = names.into_iter().map(|name| fs::folder_of(path).join(name)).collect();
    paths.sort();
    paths
}

/// Returns the value of the record in an index, if it has one.
pub(super) fn find_record<'a>(value: &'a Value, keys: &[String]) -> Option<&'a Value> {
    keys.iter().try_fold(value, |value, key| value.get(key))
}

/// Puts the record into the index, and a blank checksum next to it.
pub(super) fn insert_record(value: &mut Value, keys: &[String], record: &Record) -> Result<()> {
    let odd = || Error::invalid("the index is not a JSON object with room for the record of its files");
    let (last, above) = keys.split_last().ok_or_else(odd)?;
    let mut object = value.as_object_mut().ok_or_else(odd)?;
    for key in above {
        let inner = object.entry(key.clone()).or_insert_with(|| Value::Object(Map::new()));
        object = inner.as_object_mut().ok_or_else(odd)?;
    }
    let record = serde_json::to_value(record).map_err(|error| not_text(Path::new(""), &error))?;
    object.insert(last.clone(), record);
    object.insert(file_list::CHECKSUM_KEY.to_owned(), file_list::BLANK.into());
    Ok(())
}

/// A parsed index or intent, and the result of checking its checksum. An intent has none.
pub(super) struct List {
    pub(super) value: Value,
    pub(super) state: SealState,
}

/// Parses an index or intent. Returns `None` if the file is too large, not a regular file, or not JSON. A read failure
/// is an error, since the content is unknown.
pub(super) fn read(file: &OwnedFd, path: &Path) -> Result<Option<List>> {
    match fs::read_small_of(file, path, INDEX_BYTES_MAX) {
        Ok(text) => {
            let value = serde_json::from_slice(&text).ok();
            Ok(value.map(|value| List { value, state: file_list::seal_state(&text) }))
        }
        Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(None),
        Err(error) => Err(error),
    }
}

/// Renders an index: indented, or on one line with spaces as Python does.
pub(super) fn render(index: &Value, is_one_line: bool) -> serde_json::Result<String> {
    if !is_one_line {
        return Ok(serde_json::to_string_pretty(index)? + "\n");
    }
    let mut bytes = Vec::new();
    index.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, OneLine))?;
    bytes.push(b'\n');
    String::from_utf8(bytes).map_err(serde::ser::Error::custom)
}

struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()> {
        writer.write_all(if is_first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()> {
        writer.write_all(if is_first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

pub(super) fn contains(name: &[u8], token: &str) -> bool {
    name.windows(token.len()).any(|part| part == token.as_bytes())
}

pub(in crate::replace) fn is_token(text: &str) -> bool {
    text.len() == TOKEN_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns whether this may be a member's name.
pub(super) fn has_any_token(path: &Path) -> bool {
    let name = name_of(path);
    name.windows(TOKEN_DIGITS).any(|part| std::str::from_utf8(part).is_ok_and(is_token))
}

pub(super) fn not_text(path: &Path, error: &serde_json::Error) -> Error {
    Error::invalid(format!("the name of a file is not UTF-8: {error}")).at_path(path)
}
