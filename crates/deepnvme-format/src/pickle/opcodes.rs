//! The supported pickle opcodes.

macro_rules! opcodes {
    ($($name:ident = $code:expr;)*) => { $(pub(super) const $name: u8 = $code;)* };
}

opcodes! {
    MARK = b'(';
    STOP = b'.';
    POP = b'0';
    POP_MARK = b'1';
    DUP = b'2';
    BIN_FLOAT = b'G';
    BIN_INT = b'J';
    BIN_INT1 = b'K';
    BIN_INT2 = b'M';
    NONE = b'N';
    BIN_PERSISTENT = b'Q';
    REDUCE = b'R';
    BIN_STRING = b'T';
    SHORT_BIN_STRING = b'U';
    BIN_UNICODE = b'X';
    APPEND = b'a';
    BUILD = b'b';
    GLOBAL = b'c';
    EMPTY_DICT = b'}';
    APPENDS = b'e';
    BIN_GET = b'h';
    LONG_BIN_GET = b'j';
    EMPTY_LIST = b']';
    BIN_PUT = b'q';
    LONG_BIN_PUT = b'r';
    SET_ITEM = b's';
    TUPLE = b't';
    EMPTY_TUPLE = b')';
    SET_ITEMS = b'u';
    BIN_BYTES = b'B';
    SHORT_BIN_BYTES = b'C';
    PROTOCOL = 0x80;
    NEW_OBJECT = 0x81;
    TUPLE1 = 0x85;
    TUPLE2 = 0x86;
    TUPLE3 = 0x87;
    NEW_TRUE = 0x88;
    NEW_FALSE = 0x89;
    LONG1 = 0x8a;
    LONG4 = 0x8b;
    SHORT_BIN_UNICODE = 0x8c;
    BIN_UNICODE8 = 0x8d;
    BIN_BYTES8 = 0x8e;
    EMPTY_SET = 0x8f;
    ADD_ITEMS = 0x90;
    FROZEN_SET = 0x91;
    NEW_OBJECT_EX = 0x92;
    STACK_GLOBAL = 0x93;
    MEMOIZE = 0x94;
    FRAME = 0x95;
    BYTE_ARRAY8 = 0x96;
}
