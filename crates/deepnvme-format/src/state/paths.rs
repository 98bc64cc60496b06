//! The ways from the root to containers, linked upwards. A name is spelled out for a tensor only: a file can have as many
//! containers as bytes, each below a name as long as the file.

use crate::error::{Error, Result};
use crate::pickle::{Graph, Node, NodeId};

/// How deep containers may lie in one another.
pub const DEPTH_MAX: usize = 500;
/// The longest name of a tensor.
pub const NAME_BYTES_MAX: usize = 4 << 10;

/// What a way has that the way above it has not.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// Nothing: arguments and states go by the name of what they belong to.
    Same,
    /// A place in a row.
    Index(u32),
    /// The key of a dict.
    Key(NodeId),
}

/// Which way.
#[derive(Clone, Copy, Debug)]
pub(super) struct WayId(u32);

#[derive(Clone, Copy)]
struct Way {
    above: WayId,
    part: Part,
    depth: u32,
}

/// All ways that have been gone.
pub(super) struct Ways<'a> {
    graph: &'a Graph,
    ways: Vec<Way>,
}

impl<'a> Ways<'a> {
    pub(super) const ROOT: WayId = WayId(0);

    pub(super) fn new(graph: &'a Graph) -> Self {
        Self { graph, ways: vec![Way { above: Self::ROOT, part: Part::Same, depth: 0 }] }
    }

    /// One step further.
    pub(super) fn below(&mut self, above: WayId, part: Part) -> Result<WayId> {
        let depth = self.ways[above.0 as usize].depth + 1;
        if depth as usize > DEPTH_MAX {
            return Err(too_deep(&self.spell(above, part).unwrap_or_default()));
        }
        let id = WayId(self.ways.len() as u32);
        self.ways.push(Way { above, part, depth });
        Ok(id)
    }

    /// The name of what lies one step further: the parts joined by dots, without empty ones at the beginning.
    pub(super) fn spell(&self, above: WayId, part: Part) -> Result<String> {
        let mut parts = vec![part];
        let mut at = above;
        while at.0 != Self::ROOT.0 {
            let way = self.ways[at.0 as usize];
            parts.push(way.part);
            at = way.above;
        }
        let mut name = String::new();
        for part in parts.into_iter().rev() {
            if !matches!(part, Part::Same) && !name.is_empty() {
                name.push('.');
            }
            match part {
                Part::Same => {}
                Part::Index(index) => name += &index.to_string(),
                Part::Key(key) => match self.graph.node(key) {
                    // Looked at before it is copied: the same key may stand in the way five hundred times.
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

/// The beginning of a name.
fn shown(name: &str) -> &str {
    const SHOWN_CHARS: usize = 80;
    name.char_indices().nth(SHOWN_CHARS).map_or(name, |(end, _)| &name[..end])
}
