//! DLPack's names of torch's types. Complex and quantised types, bits, and elements that share bytes have none here.

use deepnvme_format::Dtype;
use deepnvme_mem::dlpack::DLDataType;

const PAIRS: [(Dtype, u8); 18] = [
    (Dtype::F32, DLDataType::FLOAT),
    (Dtype::Bf16, DLDataType::BFLOAT),
    (Dtype::F16, DLDataType::FLOAT),
    (Dtype::F64, DLDataType::FLOAT),
    (Dtype::I64, DLDataType::INT),
    (Dtype::I32, DLDataType::INT),
    (Dtype::I16, DLDataType::INT),
    (Dtype::I8, DLDataType::INT),
    (Dtype::U8, DLDataType::UINT),
    (Dtype::U16, DLDataType::UINT),
    (Dtype::U32, DLDataType::UINT),
    (Dtype::U64, DLDataType::UINT),
    (Dtype::Bool, DLDataType::BOOL),
    (Dtype::F8E4m3fn, DLDataType::FLOAT8_E4M3FN),
    (Dtype::F8E4m3fnuz, DLDataType::FLOAT8_E4M3FNUZ),
    (Dtype::F8E5m2, DLDataType::FLOAT8_E5M2),
    (Dtype::F8E5m2fnuz, DLDataType::FLOAT8_E5M2FNUZ),
    (Dtype::F8E8m0fnu, DLDataType::FLOAT8_E8M0FNU),
];

/// Returns DLPack's name of a type.
pub(super) fn of_torch(dtype: Dtype) -> Option<DLDataType> {
    PAIRS.iter().find(|(of_torch, _)| *of_torch == dtype).map(|(_, code)| named(dtype, *code))
}

/// Returns the type that DLPack calls so.
pub(super) fn to_torch(dtype: DLDataType) -> Option<Dtype> {
    PAIRS.iter().find(|(of_torch, code)| named(*of_torch, *code) == dtype).map(|(of_torch, _)| *of_torch)
}

fn named(dtype: Dtype, code: u8) -> DLDataType {
    DLDataType { code, bits: (dtype.bytes() * 8) as u8, lanes: 1 }
}
