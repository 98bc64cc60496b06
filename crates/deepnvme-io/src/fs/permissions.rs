//! The permissions of files. This module does no I/O.
//!
//! The group bits of a file are for its group. If the file has an access control list (ACL), they are a limit for its
//! group and for all users and groups that the list names. So they are never copied as they are to a file of another
//! group, or without the list.

use super::stat::Stat;

/// The tags of an entry of a list: the file's owner, its group, the limit, and all others.
const OWNER: u16 = 1;
const GROUP: u16 = 4;
const LIMIT: u16 = 0x10;
const OTHERS: u16 = 0x20;
/// The version of `posix_acl_xattr_header`, before the entries of eight bytes: tag, permissions, and an id.
const VERSION: [u8; 4] = 2u32.to_le_bytes();

/// Permission bits, and the group that the group bits are for. `None`: whichever group a file has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Permissions {
    /// The permission bits, without setuid, setgid and sticky.
    pub mode: u32,
    /// The group.
    pub group: Option<u32>,
}

impl Permissions {
    /// Everybody may read and write.
    pub const EVERYBODY: Self = Self { mode: 0o666, group: None };

    /// Returns the permissions of a file with this access control list, without the users and groups that the list
    /// names. With a malformed list, the group has none.
    #[must_use]
    pub fn of(stat: &Stat, list: Option<&[u8]>) -> Self {
        let mode = list.map_or(stat.mode & 0o777, |list| listed_mode(list).unwrap_or(stat.mode & 0o707));
        Self { mode, group: Some(stat.group) }
    }

    /// Returns what both allow.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let mode = self.mode & other.mode;
        match (self.group, other.group) {
            (Some(one), Some(another)) if one != another => Self { mode: without_group(mode), group: None },
            (group, other_group) => Self { mode, group: group.or(other_group) },
        }
    }
}

/// Returns the bits for a file of another group: that group may do what both the old group and all others may.
#[must_use]
pub fn without_group(mode: u32) -> u32 {
    mode & !0o070 | mode & (mode & 0o007) << 3
}

/// Returns the bits that an access control list gives to owner, group and others. `None` if it is malformed.
#[must_use]
pub fn listed_mode(list: &[u8]) -> Option<u32> {
    let entries = list.strip_prefix(&VERSION)?;
    let (mut owner, mut group, mut limit, mut others) = (None, None, 7, None);
    for entry in entries.chunks(8) {
        let (tag, allowed) = (entry.get(..2)?, entry.get(2..4)?);
        let allowed = u32::from(u16::from_le_bytes(allowed.try_into().ok()?)) & 7;
        match u16::from_le_bytes(tag.try_into().ok()?) {
            OWNER => owner = Some(allowed),
            GROUP => group = Some(allowed),
            LIMIT => limit = allowed,
            OTHERS => others = Some(allowed),
            _ => {}
        }
    }
    Some(owner? << 6 | (group? & limit) << 3 | others?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[(u16, u16)]) -> Vec<u8> {
        let entries =
            entries.iter().flat_map(|(tag, allowed)| [tag.to_le_bytes(), allowed.to_le_bytes(), [9, 9], [0, 0]]);
        [VERSION.to_vec(), entries.flatten().collect()].concat()
    }

    #[test]
    fn a_list_gives_its_group_no_more_than_it_says() {
        // user::rw- user:9:rw- group::--- mask::rw- other::---
        let named = list(&[(OWNER, 6), (2, 6), (GROUP, 0), (LIMIT, 6), (OTHERS, 0)]);
        assert_eq!(listed_mode(&named), Some(0o600));
        assert_eq!(listed_mode(&list(&[(OWNER, 7), (GROUP, 7), (LIMIT, 4), (OTHERS, 5)])), Some(0o745));
        assert_eq!(listed_mode(&list(&[(OWNER, 6), (GROUP, 4), (OTHERS, 4)])), Some(0o644));
        for odd in [&b""[..], b"\x01\0\0\0", &VERSION, &named[..named.len() - 7], &list(&[(OWNER, 6), (GROUP, 4)])] {
            assert_eq!(listed_mode(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn another_group_gets_the_permissions_that_the_old_group_and_others_share() {
        for (mode, narrowed) in [(0o640, 0o600), (0o644, 0o644), (0o660, 0o600), (0o664, 0o644), (0o604, 0o604)] {
            assert_eq!(without_group(mode), narrowed, "{mode:o}");
        }
        let of = |mode, group| Permissions { mode, group };
        assert_eq!(of(0o640, Some(1)).and(of(0o660, Some(1))), of(0o640, Some(1)));
        assert_eq!(of(0o640, Some(1)).and(of(0o640, Some(2))), of(0o600, None));
        assert_eq!(of(0o640, Some(1)).and(Permissions::EVERYBODY), of(0o640, Some(1)));
    }
}
