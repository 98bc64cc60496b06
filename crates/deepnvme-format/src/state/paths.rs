//! Paths from the root to containers, as a tree of parent links. Names are built only for tensors and for the values
//! that are listed: a file can have as many containers as bytes, each with a name as long as the file.

use crate::error::{Error, Result};
use crate::pickle::{Graph, Node, NodeId};

/// The maximum nesting depth of containers.
pub const DEPTH_MAX: usize = 500;
/// The maximum length of a tensor's name, and of a storage's key and device.
pub const NAME_BYTES_MAX: usize = 4 << 10;

/// The last component of a path.
#[derive(Clone, Copy, Debug)]
pub(super) enum PathPart {
    /// None: a parameter's arguments, keyword arguments and states have the name of their object.
    Same,
    /// An index in a sequence, or among the arguments of an object.
    Index(u32),
    /// The key of a dict.
    Key(NodeId),
}

/// Identifies a path.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathId(u32);

#[derive(Clone, Copy)]
struct Path {
    above: PathId,
    part: PathPart,
    depth: u32,
    /// The container that the path leads to.
    id: NodeId,
}

/// All visited paths.
pub(super) struct Paths<'a> {
    graph: &'a Graph,
    paths: Vec<Path>,
}

impl<'a> Paths<'a> {
    pub(super) const ROOT: PathId = PathId(0);

    pub(super) fn new(graph: &'a Graph) -> Self {
        let root = Path { above: Self::ROOT, part: PathPart::Same, depth: 0, id: graph.root() };
        Self { graph, paths: vec![root] }
    }

    /// Extends a path by one component, which leads to a container.
    pub(super) fn below(&mut self, above: PathId, part: PathPart, id: NodeId) -> Result<PathId> {
        let depth = self.paths[above.0 as usize].depth + 1;
        if depth as usize > DEPTH_MAX {
            return Err(too_deep(&self.name(above, part).unwrap_or_default()));
        }
        let path = PathId(self.paths.len() as u32);
        self.paths.push(Path { above, part, depth, id });
        Ok(path)
    }

    /// Returns whether a container is on a path, which is at most [`DEPTH_MAX`] long.
    pub(super) fn contains(&self, path: PathId, id: NodeId) -> bool {
        let mut at = path;
        while at.0 != Self::ROOT.0 {
            if self.paths[at.0 as usize].id == id {
                return true;
            }
            at = self.paths[at.0 as usize].above;
        }
        false
    }

    /// Returns whether each key of a path extended by one component has a name.
    pub(super) fn is_named(&self, above: PathId, part: PathPart) -> bool {
        let has_name = |part| !matches!(part, PathPart::Key(key) if !self.graph.has_name(key));
        let mut at = above;
        while at.0 != Self::ROOT.0 && has_name(self.paths[at.0 as usize].part) {
            at = self.paths[at.0 as usize].above;
        }
        at.0 == Self::ROOT.0 && has_name(part)
    }

    /// Returns the name of a path extended by one component: components joined by dots, without empty ones at the
    /// start.
    pub(super) fn name(&self, above: PathId, part: PathPart) -> Result<String> {
        let mut parts = vec![part];
        let mut at = above;
        while at.0 != Self::ROOT.0 {
            let path = self.paths[at.0 as usize];
            parts.push(path.part);
            at = path.above;
        }
        let mut name = String::new();
        for part in parts.into_iter().rev() {
            if !matches!(part, PathPart::Same) && !name.is_empty() {
                name.push('.');
            }
            match part {
                PathPart::Same => {}
                PathPart::Index(index) => name += &index.to_string(),
                PathPart::Key(key) => match self.graph.node(key) {
                    // Checked before it is copied: one key may occur five hundred times in a path.
                    Node::Str(text) if text.len() > NAME_BYTES_MAX => return Err(too_long(&(name + shown(text)))),
                    Node::Surrogates(bytes) if bytes.len() > NAME_BYTES_MAX => return Err(too_long(&name)),
                    _ => name += &self.graph.key_name(key),
                },
            }
            if name.len() > NAME_BYTES_MAX {
                return Err(too_long(&name));
            }
        }
        Ok(name)
    }
}

fn too_deep(name: &str) -> Error {
    let name = shown(name);
    Error::unsupported(format!("the objects below {name:?} lie more than {DEPTH_MAX} deep in one another"))
}

fn too_long(name: &str) -> Error {
    let name = shown(name);
    Error::unsupported(format!("the name of the tensor {name:?}... has more than {NAME_BYTES_MAX} bytes"))
}

/// Returns the start of a name, for messages.
fn shown(name: &str) -> &str {
    const SHOWN_CHARS: usize = 80;
    name.char_indices().nth(SHOWN_CHARS).map_or(name, |(end, _)| &name[..end])
}
