//! Pickles, instruction by instruction: protocol 2, as torch writes and its restricted unpickler reads.

use std::collections::HashMap;

use crate::dtype::Dtype;
use crate::state::Signs;

/// A pickle that is being written.
#[derive(Debug)]
pub struct Emitter {
    bytes: Vec<u8>,
    globals: HashMap<&'static str, u32>,
    memoized: u32,
}

/// A tensor, as a pickle has it: a view of a storage that the archive has in a record of its own.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// The number in the name of the storage's record.
    pub key: usize,
    /// The type of the elements.
    pub dtype: Dtype,
    /// Elements of the storage.
    pub storage_elements: u64,
    /// Where the tensor begins in it, in elements.
    pub offset: u64,
    /// Sizes.
    pub shape: &'a [u64],
    /// Strides, in elements.
    pub strides: &'a [u64],
    /// Whether it takes part in training.
    pub requires_grad: bool,
    /// Which of its signs are the opposite of those in the storage.
    pub signs: Signs,
}

impl Default for Emitter {
    fn default() -> Self {
        Self { bytes: b"\x80\x02".to_vec(), globals: HashMap::new(), memoized: 0 }
    }
}

impl Emitter {
    /// Instructions, as they are.
    pub fn raw(&mut self, instructions: &[u8]) {
        self.bytes.extend(instructions);
    }

    /// An integer.
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

    /// A float.
    pub fn float(&mut self, value: f64) {
        self.bytes.push(b'G');
        self.bytes.extend(value.to_be_bytes());
    }

    /// A string of less than 4 GiB.
    pub fn text(&mut self, text: &str) {
        self.bytes.push(b'X');
        self.bytes.extend((text.len() as u32).to_le_bytes());
        self.bytes.extend(text.as_bytes());
    }

    /// A truth value.
    pub fn flag(&mut self, value: bool) {
        self.bytes.push(if value { 0x88 } else { 0x89 });
    }

    /// A class or function, by the instruction that fetches it; from the second time on, what was kept of the first.
    pub fn global(&mut self, instruction: &'static str) {
        if let Some(index) = self.globals.get(instruction).copied() {
            return self.get(index);
        }
        self.bytes.extend(instruction.as_bytes());
        let index = self.put();
        self.globals.insert(instruction, index);
    }

    /// Keeps the object that was written last; what it is fetched by.
    pub fn put(&mut self) -> u32 {
        let index = self.memoized;
        if let Ok(small) = u8::try_from(index) {
            self.bytes.extend([b'q', small]);
        } else {
            self.bytes.push(b'r');
            self.bytes.extend(index.to_le_bytes());
        }
        self.memoized += 1;
        index
    }

    /// An object that was kept.
    pub fn get(&mut self, index: u32) {
        if let Ok(small) = u8::try_from(index) {
            self.bytes.extend([b'h', small]);
        } else {
            self.bytes.push(b'j');
            self.bytes.extend(index.to_le_bytes());
        }
    }

    /// An empty ordered dict.
    pub fn ordered_dict(&mut self) {
        self.global("ccollections\nOrderedDict\n");
        self.bytes.extend(b")R");
    }

    /// A tensor. Types that are newer than the classes of storages have untyped ones, and are named with the tensor.
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
        // Each tensor has hooks of its own, or one of one would be one of all.
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

    /// A tuple of numbers.
    fn numbers(&mut self, numbers: &[u64]) {
        self.bytes.push(b'(');
        numbers.iter().for_each(|number| self.int(*number as i64));
        self.bytes.push(b't');
    }

    /// The whole pickle.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.push(b'.');
        self.bytes
    }
}
