//! Element types, and their names in torch and safetensors.

/// The type of a tensor's elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum Dtype {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    Bf16,
    F32,
    F64,
    Complex32,
    Complex64,
    Complex128,
    F8E4m3fn,
    F8E4m3fnuz,
    F8E5m2,
    F8E5m2fnuz,
    F8E8m0fnu,
    F4E2m1fnX2,
    QUInt8,
    QInt8,
    QInt32,
    QUInt4x2,
    QUInt2x4,
    Bits8,
    Bits16,
    Bits1x8,
    Bits2x4,
    Bits4x2,
    BComplex32,
}

struct Row {
    dtype: Dtype,
    torch: &'static str,
    /// The storage class in archives, for types that have one.
    storage: Option<&'static str>,
    safetensors: Option<&'static str>,
    bytes: u64,
}

const fn row(
    dtype: Dtype,
    torch: &'static str,
    storage: Option<&'static str>,
    safetensors: Option<&'static str>,
    bytes: u64,
) -> Row {
    Row { dtype, torch, storage, safetensors, bytes }
}

const ROWS: [Row; 33] = [
    row(Dtype::Bool, "bool", Some("BoolStorage"), Some("BOOL"), 1),
    row(Dtype::U8, "uint8", Some("ByteStorage"), Some("U8"), 1),
    row(Dtype::I8, "int8", Some("CharStorage"), Some("I8"), 1),
    row(Dtype::U16, "uint16", None, Some("U16"), 2),
    row(Dtype::I16, "int16", Some("ShortStorage"), Some("I16"), 2),
    row(Dtype::U32, "uint32", None, Some("U32"), 4),
    row(Dtype::I32, "int32", Some("IntStorage"), Some("I32"), 4),
    row(Dtype::U64, "uint64", None, Some("U64"), 8),
    row(Dtype::I64, "int64", Some("LongStorage"), Some("I64"), 8),
    row(Dtype::F16, "float16", Some("HalfStorage"), Some("F16"), 2),
    row(Dtype::Bf16, "bfloat16", Some("BFloat16Storage"), Some("BF16"), 2),
    row(Dtype::F32, "float32", Some("FloatStorage"), Some("F32"), 4),
    row(Dtype::F64, "float64", Some("DoubleStorage"), Some("F64"), 8),
    row(Dtype::Complex32, "complex32", None, None, 4),
    row(Dtype::Complex64, "complex64", Some("ComplexFloatStorage"), Some("C64"), 8),
    row(Dtype::Complex128, "complex128", Some("ComplexDoubleStorage"), None, 16),
    row(Dtype::F8E4m3fn, "float8_e4m3fn", None, Some("F8_E4M3"), 1),
    row(Dtype::F8E4m3fnuz, "float8_e4m3fnuz", None, Some("F8_E4M3FNUZ"), 1),
    row(Dtype::F8E5m2, "float8_e5m2", None, Some("F8_E5M2"), 1),
    row(Dtype::F8E5m2fnuz, "float8_e5m2fnuz", None, Some("F8_E5M2FNUZ"), 1),
    row(Dtype::F8E8m0fnu, "float8_e8m0fnu", None, Some("F8_E8M0"), 1),
    row(Dtype::F4E2m1fnX2, "float4_e2m1fn_x2", None, None, 1),
    row(Dtype::QUInt8, "quint8", Some("QUInt8Storage"), None, 1),
    row(Dtype::QInt8, "qint8", Some("QInt8Storage"), None, 1),
    row(Dtype::QInt32, "qint32", Some("QInt32Storage"), None, 4),
    row(Dtype::QUInt4x2, "quint4x2", Some("QUInt4x2Storage"), None, 1),
    row(Dtype::QUInt2x4, "quint2x4", Some("QUInt2x4Storage"), None, 1),
    row(Dtype::Bits8, "bits8", None, None, 1),
    row(Dtype::Bits16, "bits16", None, None, 2),
    row(Dtype::Bits1x8, "bits1x8", None, None, 1),
    row(Dtype::Bits2x4, "bits2x4", None, None, 1),
    row(Dtype::Bits4x2, "bits4x2", None, None, 1),
    row(Dtype::BComplex32, "bcomplex32", None, None, 4),
];

impl Dtype {
    /// All types.
    pub const ALL: [Self; ROWS.len()] = {
        let mut all = [Self::Bool; ROWS.len()];
        let mut index = 0;
        while index < ROWS.len() {
            all[index] = ROWS[index].dtype;
            index += 1;
        }
        all
    };

    fn row(self) -> &'static Row {
        // The rows are in the order of the variants, as a test checks.
        &ROWS[self as usize]
    }

    /// Returns the bytes of one element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.row().bytes
    }

    /// Returns whether an element has a real and an imaginary part.
    #[must_use]
    pub fn is_complex(self) -> bool {
        matches!(self, Self::Complex32 | Self::Complex64 | Self::Complex128 | Self::BComplex32)
    }

    /// Returns whether several elements lie in one byte, so that no element has an address of its own.
    #[must_use]
    pub fn elements_share_bytes(self) -> bool {
        matches!(self, Self::QUInt4x2 | Self::QUInt2x4)
    }

    /// Returns torch's name, without `torch.`.
    #[must_use]
    pub fn torch_name(self) -> &'static str {
        self.row().torch
    }

    /// Returns the name in a safetensors header; `None` for types that the format lacks.
    #[must_use]
    pub fn safetensors_name(self) -> Option<&'static str> {
        self.row().safetensors
    }

    /// Returns the storage class in archives; `None` for types that are stored untyped.
    #[must_use]
    pub fn storage_class(self) -> Option<&'static str> {
        self.row().storage
    }

    /// Finds a type by torch's name, without `torch.`.
    #[must_use]
    pub fn from_torch(name: &str) -> Option<Self> {
        ROWS.iter().find(|row| row.torch == name).map(|row| row.dtype)
    }

    /// Finds a type by its storage class.
    #[must_use]
    pub fn from_storage_class(name: &str) -> Option<Self> {
        ROWS.iter().find(|row| row.storage == Some(name)).map(|row| row.dtype)
    }

    /// Finds a type by its name in a safetensors header.
    #[must_use]
    pub fn from_safetensors(name: &str) -> Option<Self> {
        ROWS.iter().find(|row| row.safetensors == Some(name)).map(|row| row.dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stand_in_order_and_names_lead_back() {
        for (index, row) in ROWS.iter().enumerate() {
            assert_eq!(row.dtype as usize, index);
            assert_eq!(Dtype::from_torch(row.dtype.torch_name()), Some(row.dtype));
            if let Some(name) = row.dtype.safetensors_name() {
                assert_eq!(Dtype::from_safetensors(name), Some(row.dtype));
            }
            if let Some(name) = row.dtype.storage_class() {
                assert_eq!(Dtype::from_storage_class(name), Some(row.dtype));
            }
            assert!(row.dtype.bytes().is_power_of_two());
        }
    }
}
