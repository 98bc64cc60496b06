//! Mutate JSON documents.

use serde_json::{Value, json};

pub(crate) const NUMBERS: [u64; 9] = [0, 1, 7, 255, 4096, 1 << 32, i64::MAX as u64, u64::MAX - 1, u64::MAX];

const TEXTS: [&str; 8] =
    ["", "F64", "I32", "../x", "/etc/passwd", "__metadata__", "deepnvme.checksums", "\u{0}\u{1f600}"];

/// Changes one thing in a document.
pub(crate) fn mutate(value: &mut Value, dice: &mut fastrand::Rng) {
    // Descend three times out of four.
    if dice.u8(..4) > 0 {
        match value {
            Value::Object(entries) if !entries.is_empty() => {
                let at = dice.usize(..entries.len());
                return mutate(entries.values_mut().nth(at).unwrap(), dice);
            }
            Value::Array(items) if !items.is_empty() => {
                let at = dice.usize(..items.len());
                return mutate(&mut items[at], dice);
            }
            // JSON inside a JSON string.
            Value::String(text) => {
                if let Ok(mut inner) = serde_json::from_str::<Value>(text)
                    && !inner.is_number()
                {
                    mutate(&mut inner, dice);
                    *text = inner.to_string();
                    return;
                }
            }
            _ => {}
        }
    }
    match value {
        Value::Number(number) => {
            let number = number.as_u64().unwrap_or(0);
            *value = match dice.u8(..5) {
                0 => number.wrapping_add(1).into(),
                1 => number.wrapping_sub(1).into(),
                2 => (-1).into(),
                3 => (number as f64 + 0.5).into(),
                _ => NUMBERS[dice.usize(..NUMBERS.len())].into(),
            };
        }
        Value::String(text) => match dice.u8(..5) {
            0 => text.push('0'),
            1 => drop(text.pop()),
            2 => *text = TEXTS[dice.usize(..TEXTS.len())].into(),
            3 => *text = text.repeat(100),
            _ => {
                let other = if text.contains('0') { text.replacen('0', "1", 1) } else { text.to_uppercase() };
                *text = other;
            }
        },
        Value::Array(items) => match dice.u8(..4) {
            0 => drop(items.pop()),
            1 => items.reverse(),
            2 => items.push(items.first().cloned().unwrap_or(Value::Null)),
            _ => *items = vec![json!(1); 70],
        },
        Value::Object(entries) => {
            let key = entries.keys().nth(dice.usize(..entries.len().max(1))).cloned().unwrap_or_default();
            let taken = entries.remove(&key);
            match dice.u8(..4) {
                0 => {}
                1 => drop(entries.insert(TEXTS[dice.usize(..TEXTS.len())].into(), taken.unwrap_or(Value::Null))),
                2 => drop(entries.insert(format!("{key}x"), taken.unwrap_or(Value::Null))),
                _ => {
                    let other = entries.values().next().cloned().unwrap_or(Value::Null);
                    entries.insert(key, other);
                }
            }
        }
        _ => *value = nested(dice.usize(1..2000)),
    }
}

fn nested(depth: usize) -> Value {
    (0..depth.min(100)).fold(Value::Null, |inner, _| json!([inner]))
}
