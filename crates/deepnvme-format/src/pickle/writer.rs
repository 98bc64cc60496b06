//! Writes pickles of protocol 2, as torch writes them and its restricted unpickler reads them.

use std::collections::HashMap;

use crate::dtype::Dtype;
use crate::signs::Signs;

/// Writes a pickle.
#[derive(Debug)]
pub struct PickleWriter {
    bytes: Vec<u8>,
    globals: HashMap<&'static str, u32>,
    memoised: u32,
}

/// A tensor in a pickle: a view of a storage in a record of its own.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Number in the name of the storage's record.
    pub key: usize,
    /// Element type.
    pub dtype: Dtype,
    /// Number of elements of the storage.
    pub storage_elements: u64,
    /// Offset in the storage, in elements.
    pub offset: u64,
    /// Shape.
    pub shape: &'a [u64],
    /// Strides, in elements.
    pub strides: &'a [u64],
    /// torch's `requires_grad`.
    pub requires_grad: bool,
    /// Signs that are flipped relative to the storage.
    pub signs: Signs,
}

impl Default for PickleWriter {
    fn default() -> Self {
        Self { bytes: b"\x80\x02".to_vec(), globals: HashMap::new(), memoised: 0 }
    }
}

impl PickleWriter {
    /// Writes raw instructions.
    pub fn raw(&mut self, instructions: &[u8]) {
        self.bytes.extend(instructions);
    }

    /// Writes an integer.
    pub fn int(&mut self, value: i64) {
        if let Ok(small) = u8::try_from(value) {
            self.bytes.extend([b'K', small]);
        } else if let Ok(short) = u16::try_from(value) {
            self.bytes.push(b'M');
            self.bytes.extend(short.to_le_bytes());
        } else if let Ok(word) = i32::try_from(value) {
            self.bytes.push(b'J');
            self.bytes.extend(word.to_le_bytes());
        } else {
            self.bytes.extend([0x8a, 8]);
            self.bytes.extend(value.to_le_bytes());
        }
    }

    /// Writes a float.
    pub fn float(&mut self, value: f64) {
        self.bytes.push(b'G');
        self.bytes.extend(value.to_be_bytes());
    }

    /// Writes a string of less than 4 GiB.
    pub fn text(&mut self, text: &str) {
        self.bytes.push(b'X');
        self.bytes.extend((text.len() as u32).to_le_bytes());
        self.bytes.extend(text.as_bytes());
    }

    /// Writes a boolean.
    pub fn flag(&mut self, value: bool) {
        self.bytes.push(if value { 0x88 } else { 0x89 });
    }

    /// Writes a class or function by the instruction that fetches it. Later uses come from the memo.
    pub fn global(&mut self, instruction: &'static str) {
        if let Some(index) = self.globals.get(instruction).copied() {
            return self.get(index);
        }
        self.bytes.extend(instruction.as_bytes());
        let index = self.put();
        self.globals.insert(instruction, index);
    }

    /// Stores the last object in the memo. Returns its index.
    pub fn put(&mut self) -> u32 {
        let index = self.memoised;
        if let Ok(small) = u8::try_from(index) {
            self.bytes.extend([b'q', small]);
        } else {
            self.bytes.push(b'r');
            self.bytes.extend(index.to_le_bytes());
        }
        self.memoised += 1;
        index
    }

    /// Writes an object from the memo.
    pub fn get(&mut self, index: u32) {
        if let Ok(small) = u8::try_from(index) {
            self.bytes.extend([b'h', small]);
        } else {
            self.bytes.push(b'j');
            self.bytes.extend(index.to_le_bytes());
        }
    }

    /// Writes an empty ordered dict.
    pub fn ordered_dict(&mut self) {
        self.global("ccollections\nOrderedDict\n");
        self.bytes.extend(b")R");
    }

    /// Writes a tensor. Types without a storage class use an untyped storage and name the type in the tensor.
    pub fn tensor(&mut self, view: &TensorView<'_>) {
        let class = view.dtype.storage_class();
        self.global(match class {
            Some(_) => "ctorch._utils\n_rebuild_tensor_v2\n",
            None => "ctorch._utils\n_rebuild_tensor_v3\n",
        });
        self.bytes.extend(b"((");
        self.text("storage");
        match class {
            Some(class) => self.bytes.extend(format!("ctorch\n{class}\n").as_bytes()),
            None => self.bytes.extend(b"ctorch.storage\nUntypedStorage\n"),
        }
        self.text(&view.key.to_string());
        self.text("cpu");
        self.int((view.storage_elements * if class.is_some() { 1 } else { view.dtype.bytes() }) as i64);
        self.bytes.extend(b"tQ");
        self.int(view.offset as i64);
        self.numbers(view.shape);
        self.numbers(view.strides);
        self.flag(view.requires_grad);
        // Each tensor needs its own hooks: a shared dict would be shared after loading.
        self.ordered_dict();
        if class.is_none() {
            self.bytes.extend(format!("ctorch\n{}\n", view.dtype.torch_name()).as_bytes());
        }
        if !view.signs.are_plain() {
            self.bytes.push(b'}');
            for (name, is_set) in [("conj", view.signs.is_conj), ("neg", view.signs.is_neg)] {
                if is_set {
                    self.text(name);
                    self.bytes.extend(b"\x88s");
                }
            }
        }
        self.bytes.extend(b"tR");
    }

    /// Writes a tuple of numbers.
    fn numbers(&mut self, numbers: &[u64]) {
        self.bytes.push(b'(');
        numbers.iter().for_each(|number| self.int(*number as i64));
        self.bytes.push(b't');
    }

    /// Returns the pickle.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.push(b'.');
        self.bytes
    }
}
