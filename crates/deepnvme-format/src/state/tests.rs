//! Walks of valid graphs and of malicious ones.

use super::walk::{Limits, Walk};
use super::*;
use crate::error::{Error, Result};
use crate::pickle;

/// `_rebuild_tensor_v2` of two floats, without the instruction that ends its arguments; the storage is in the memo at
/// 0, the function at 1, a tuple with the number 1 at 2.
const HEAD: &[u8] = b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x02tQq\x000ctorch._utils\n_rebuild_tensor_v2\nq\x010K\x01\x85q\x020";
const TENSOR: &[u8] = b"h\x01(h\0K\0h\x02h\x02tR";

fn pickled(parts: &[&[u8]]) -> Vec<u8> {
    [HEAD, &parts.concat(), b"."].concat()
}

fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

fn names(pickle: &[u8]) -> Result<Vec<String>> {
    let state = PickledState::of(&pickle::parse(pickle)?)?;
    Ok(state.tensors.into_iter().map(|tensor| tensor.name).collect())
}

#[track_caller]
fn refused(pickle: &[u8], limits: Limits, word: &str) {
    let graph = pickle::parse(pickle).unwrap();
    match Walk::new(&graph, limits).run() {
        Err(Error::Unsupported(text)) => assert!(text.contains(word), "{text}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn names_are_paths_from_the_root() {
    // {"a": {3: [t, (t,)], True: t, None: t}, "": {"": t}}
    let inner = [b"}(K\x03](", TENSOR, TENSOR, b"\x85e\x88", TENSOR, b"N", TENSOR, b"u"].concat();
    let pickle = pickled(&[b"}(", &text("a"), &inner, &text(""), b"}", &text(""), TENSOR, b"su"]);
    assert_eq!(names(&pickle).unwrap(), ["a.3.0", "a.3.1.0", "a.True", "a.None", ""]);
    assert_eq!(names(&pickled(&[TENSOR])).unwrap(), [""]);
    // A parameter has the name of its tensor, and an attribute that of its object and its own.
    let parameter =
        [b"ctorch._utils\n_rebuild_parameter\n", TENSOR, b"\x88}\x87R}", &text("scale"), TENSOR, b"sb"].concat();
    assert_eq!(names(&pickled(&[b"}", &text("p"), &parameter, b"s"])).unwrap(), ["p", "p.scale"]);
}

#[test]
fn keyword_arguments_are_walked() {
    let pickle = pickled(&[b"cmodule\nClass\n", TENSOR, b"\x85}", &text("k"), TENSOR, b"s\x92"]);
    assert_eq!(names(&pickle).unwrap(), ["0", "k"]);
}

#[test]
fn a_tensor_in_several_places_is_listed_for_each() {
    let pickle = pickled(&[b"](", TENSOR, b"q\x05h\x05]h\x05aq\x06h\x06e"]);
    assert_eq!(names(&pickle).unwrap(), ["0", "1", "2.0", "3.0"]);
    // {"a": {"w": t}, "b": the same dict}, and the same of a parameter.
    let dict = [b"}", &text("w")[..], TENSOR, b"sq\x07"].concat();
    let twice = pickled(&[b"}(", &text("a"), &dict, &text("b"), b"h\x07u"]);
    assert_eq!(names(&twice).unwrap(), ["a.w", "b.w"]);
    let parameter = [b"ctorch._utils\n_rebuild_parameter\n", TENSOR, b"\x88}\x87Rq\x07"].concat();
    let twice = pickled(&[b"}(", &text("a"), &parameter, &text("b"), b"h\x07u"]);
    assert_eq!(names(&twice).unwrap(), ["a", "b"]);
    // A list that contains itself twice, and a tensor.
    assert_eq!(names(&pickled(&[b"]q\x07(h\x07", TENSOR, b"h\x07e"])).unwrap(), ["1"]);
    // [x, y] with x = [y] and y = [x, t]: from y, x leads nowhere new.
    let knot = pickled(&[b"](]q\x07](h\x07", TENSOR, b"eq\x08ah\x08e"]);
    assert_eq!(names(&knot).unwrap(), ["0.0.1", "1.1"]);
}

#[test]
fn visits_of_shared_containers_have_a_limit() {
    let level = b"q\x030]h\x03ah\x03a";
    let shared = |levels: usize| pickled(&[b"]", TENSOR, b"a", &level.repeat(levels)]);
    assert_eq!(names(&shared(10)).unwrap().len(), 1 << 10);
    refused(&shared(400), Limits::default(), "refer to each other more than 524288 times");
    // Without tensors they are visited once.
    assert_eq!(names(&pickled(&[b"](]", &level.repeat(400), TENSOR, b"e"])).unwrap(), ["1"]);
}

#[test]
fn depth_has_a_limit() {
    let nested = |depth| pickled(&[&b"]".repeat(depth), TENSOR, &b"a".repeat(depth)]);
    assert_eq!(names(&nested(DEPTH_MAX)).unwrap(), [vec!["0"; DEPTH_MAX].join(".")]);
    refused(&nested(DEPTH_MAX + 1), Limits::default(), "500 deep");
    refused(&nested(100_000), Limits::default(), "500 deep");
    let states = [b"cmodule\nClass\n)R".repeat(600), b"b".repeat(599)].concat();
    refused(&pickled(&[&states]), Limits::default(), "500 deep");
}

#[test]
fn names_of_tensors_have_a_limit() {
    let key = text(&"k".repeat(1 << 20));
    refused(&pickled(&[b"}", &key, TENSOR, b"s"]), Limits::default(), "4096 bytes");
    let parts = [b"}", &text(&"k".repeat(100))[..]].concat();
    refused(&pickled(&[&parts.repeat(50), TENSOR, &b"s".repeat(50)]), Limits::default(), "4096 bytes");
    // Other names are not built: this would be a terabyte.
    let lists = b"]K\x01a".repeat(1 << 20);
    assert_eq!(names(&pickled(&[b"}", &key, b"](", &lists, b"es"])).unwrap(), Vec::<String>::new());
}

#[test]
fn arguments_of_tensors_are_visited_once() {
    // Tensors that have the previous tensor twice among their arguments.
    let level = b"q\x030h\x01(h\0K\0h\x02h\x02h\x03h\x03tR";
    let found = names(&pickled(&[TENSOR, &level.repeat(18)])).unwrap();
    assert_eq!(found.len(), 1 + 2 * 18);
    // Objects whose arguments are the same long tuple.
    let many = [b"(", &b"]K\x01a".repeat(2000)[..], TENSOR, b"tq\x04](", &b"cm\nC\nh\x04R".repeat(2000), b"e"].concat();
    let expected: Vec<_> = (0..2000).map(|object| format!("{object}.2000")).collect();
    assert_eq!(names(&pickled(&[&many])).unwrap(), expected);
}

#[test]
fn steps_and_memory_have_limits() {
    let many = pickled(&[b"](", TENSOR, b"q\x05", &b"h\x05".repeat(1000), b"e"]);
    let limits = Limits { steps: 1000, ..Limits::default() };
    refused(&many, limits, "1000 times");
    let limits = Limits { state_bytes: 100_000, ..Limits::default() };
    refused(&many, limits, "100000 bytes");
    assert_eq!(names(&many).unwrap().len(), 1001);
}

#[test]
fn names_of_storages_have_a_limit() {
    let long = text(&"0".repeat(1 << 20));
    let storage = |key: &[u8], device: &[u8]| {
        let parts = [b"\x80\x02(", &text("storage")[..], b"ctorch\nFloatStorage\n", key, device, b"K\x02tQ."];
        PickledState::of(&pickle::parse(&parts.concat()).unwrap()).map(|state| state.storages.len())
    };
    assert_eq!(storage(&text("0"), &text("cpu")), Ok(1));
    for refused in [storage(&long, &text("cpu")), storage(&text("0"), &long)] {
        assert!(refused.unwrap_err().to_string().contains("4096 bytes"));
    }
}

#[test]
fn a_shape_has_a_limit() {
    let ones = |count: usize| [b"(", &b"K\x01".repeat(count)[..], b"t"].concat();
    let tensor = |count| pickled(&[b"h\x01(h\0K\0", &ones(count), &ones(count), b"tR"]);
    assert_eq!(names(&tensor(crate::DIMS_MAX)).unwrap(), [""]);
    assert!(matches!(names(&tensor(crate::DIMS_MAX + 1)), Err(Error::Unsupported(_))));
}

#[test]
fn non_tensors_are_listed_in_order() {
    let named = |parts: &[&[u8]]| non_tensors(&pickle::parse(&pickled(parts)).unwrap());
    // {"a": [1, t, (None, {2: "x"})], "o": OrderedDict(k=True), "c": C(), "s": {1}}
    let list = [b"](K\x01", TENSOR, b"N}K\x02", &text("x"), b"s\x86e"].concat();
    let ordered = [b"ccollections\nOrderedDict\n)R", &text("k")[..], b"\x88s"].concat();
    let found = named(&[
        b"}(",
        &text("a"),
        &list,
        &text("o"),
        &ordered,
        &text("c"),
        b"cm\nC\n)R",
        &text("s"),
        b"\x8f(K\x01\x90u",
    ]);
    let found: Vec<_> = found.iter().map(|(name, kind)| (name.as_str(), *kind)).collect();
    let wanted =
        [("a.0", "int"), ("a.2.0", "None"), ("a.2.1.2", "str"), ("o.k", "bool"), ("c", "object"), ("s", "set")];
    assert_eq!(found, wanted);
    assert_eq!(named(&[b"K\x01"]), [(String::new(), "int")]);
    assert_eq!(named(&[&b"]".repeat(600), b"N", &b"a".repeat(600)]), []);
}

#[test]
fn non_tensors_have_a_limit() {
    let many = |key: &str| {
        let rows = [b"](", &b"N".repeat(2 * NON_TENSORS_MAX)[..], b"e"].concat();
        non_tensors(&pickle::parse(&pickled(&[b"}", &text(key), &rows, b"s"])).unwrap()).len()
    };
    assert_eq!(many("k"), NON_TENSORS_MAX);
    // Names that are too long count towards the limit.
    assert_eq!(many(&"k".repeat(NAME_BYTES_MAX)), 0);
    let shared = [b"]", &b"q\x030]h\x03ah\x03a".repeat(400)[..]].concat();
    assert_eq!(non_tensors(&pickle::parse(&pickled(&[&shared])).unwrap()), []);
}
