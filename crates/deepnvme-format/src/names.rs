//! Which of a file's tensors somebody wants, by name.

/// Names, or patterns of names: `*` stands for any text, `?` for one character. What matches the beginning of a name up
/// to a dot matches all that is below it: `layers.0` is the whole layer.
#[derive(Clone, Debug, Default)]
pub struct Patterns(Vec<Vec<char>>);

impl Patterns {
    /// These patterns; none at all match nothing.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Self {
        Self(patterns.into_iter().map(|pattern| pattern.chars().collect()).collect())
    }

    /// Which pattern matches the name first.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<usize> {
        let name: Vec<char> = name.chars().collect();
        self.0.iter().position(|pattern| {
            let dots = (0..name.len()).filter(|at| name[*at] == '.');
            matches(pattern, &name) || dots.into_iter().any(|at| matches(pattern, &name[..at]))
        })
    }

    /// Whether any of them matches the name.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        self.find(name).is_some()
    }
}

/// Whether the pattern is the whole text. A star that was passed is gone back to at most once for each character.
fn matches(pattern: &[char], text: &[char]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(wanted) if *wanted == '?' || *wanted == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    p = at + 1;
                    t = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|rest| *rest == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_names_and_wildcards() {
        for (pattern, name, is_match) in [
            ("a.b", "a.b", true),
            ("a.b", "a.bc", false),
            ("a", "a.b.c", true),
            ("a.", "a.b", false),
            ("*.weight", "layers.0.weight", true),
            ("*.weight", "layers.0.bias", false),
            ("layers.?.bias", "layers.7.bias", true),
            ("layers.?.bias", "layers.17.bias", false),
            ("layers.1*", "layers.17.bias", true),
            ("*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", false),
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("\u{e4}*", "\u{e4}\u{f6}", true),
        ] {
            assert_eq!(Patterns::new([pattern]).matches(name), is_match, "{pattern:?} {name:?}");
        }
        assert!(!Patterns::new([]).matches("a"));
        assert_eq!(Patterns::new(["x", "a"]).find("a.b"), Some(1));
    }
}
