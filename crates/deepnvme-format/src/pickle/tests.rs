//! Valid, damaged and malicious pickles.

use proptest::prelude::*;

use super::*;

/// `pickle.dumps({"a": [1, -2, 2**40, None, True, 1.5], "b": (b"xy", {"z"})}, protocol)`, by CPython 3.11.
const PROTOCOL2: &[u8] = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xff\x8a\x06\x00\x00\x00\x00\x00\x01N\x88G?\xf8\x00\x00\x00\x00\x00\x00eX\x01\x00\x00\x00bq\x03c_codecs\nencode\nq\x04X\x02\x00\x00\x00xyq\x05X\x06\x00\x00\x00latin1q\x06\x86q\x07Rq\x08cbuiltins\nset\nq\t]q\nX\x01\x00\x00\x00zq\x0ba\x85q\x0cRq\r\x86q\x0eu.";
const PROTOCOL4: &[u8] = b"\x80\x04\x956\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xff\x8a\x06\x00\x00\x00\x00\x00\x01N\x88G?\xf8\x00\x00\x00\x00\x00\x00e\x8c\x01b\x94C\x02xy\x94\x8f\x94(\x8c\x01z\x94\x90\x86\x94u.";

#[test]
fn pickles_of_python_are_parsed() {
    for (pickle, protocol) in [(PROTOCOL2, 2), (PROTOCOL4, 4)] {
        let graph = parse(pickle).unwrap();
        let Node::Dict(items) = graph.node(graph.root()) else { panic!("no dict") };
        assert_eq!(items.iter().map(|(key, _)| graph.text(*key)).collect::<Vec<_>>(), [Some("a"), Some("b")]);
        let Node::List(list) = graph.node(items[0].1) else { panic!("no list") };
        let list: Vec<_> = list.iter().map(|id| graph.node(*id).clone()).collect();
        let wanted = [Node::Int(1), Node::Int(-2), Node::Int(1 << 40), Node::None, Node::Bool(true), Node::Float(1.5)];
        assert_eq!(list, wanted);
        let tuple = graph.tuple(items[1].1).unwrap();
        match (protocol, graph.node(tuple[0])) {
            (4, Node::Bytes(bytes)) => assert_eq!(&**bytes, b"xy"),
            (2, Node::Object(object)) => assert_eq!(graph.global(object.callable), Some(("_codecs", "encode"))),
            (_, other) => panic!("{other:?}"),
        }
    }
}

#[test]
fn truncated_and_changed_pickles_are_an_error_or_a_graph() {
    for pickle in [PROTOCOL2, PROTOCOL4] {
        for cut in 0..pickle.len() {
            assert!(parse(&pickle[..cut]).is_err());
        }
        for at in 0..pickle.len() {
            for value in 0..=255 {
                let mut damaged = pickle.to_vec();
                damaged[at] = value;
                let _ = parse(&damaged);
            }
        }
    }
}

#[test]
fn inconsistent_pickles_are_refused() {
    for (pickle, word) in [
        (&b"\x80\x02B\xff\xff\xff\xff."[..], "ends in the middle"),
        (b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xff.", "ends in the middle"),
        (b"\x80\x02h\x05.", "not there"),
        (b"\x80\x02K\x01K\x02R.", "not a tuple"),
        (b"\x80\x02]K\x01b.", "has none"),
        (b"\x80\x02K\x01K\x02a.", "not a list"),
        (b"\x80\x02.", "than there is"),
        (b"\x80\x02K\x01(0.", "than there is"),
        (b"\x80\x02t.", "mark"),
        (b"\x80\x09.", "protocol 9"),
        (b"\x80\x02i.", "instruction 0x69"),
    ] {
        let error = parse(pickle).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_an_error_or_a_graph(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(graph) = parse(&bytes) {
            prop_assert!(graph.len() <= bytes.len());
        }
    }
}

/// Returns a pickle with repeated instructions.
fn repeated(head: &[u8], body: &[u8], count: usize, tail: &[u8]) -> Vec<u8> {
    [head, &body.repeat(count), tail].concat()
}

#[test]
fn globals_share_their_names() {
    let name = [&b"X\0\0\x10\0"[..], &vec![b'a'; 1 << 20]].concat();
    let pickle = repeated(&[b"\x80\x04", &name[..], b"q\0"].concat(), b"h\0h\0\x930", 100_000, b".");
    let graph = parse(&pickle).unwrap();
    assert_eq!(graph.len(), 100_001);
    let all = graph.nodes().iter().filter(|node| matches!(node, Node::Global(..))).count();
    assert_eq!(all, 100_000);
}

#[test]
fn the_memory_of_objects_is_counted() {
    let lists = |count| repeated(b"\x80\x02", b"]", count, b".");
    let one = node_bytes(&Node::List(Vec::new())) as u64;
    assert_eq!(parse_within(&lists(100), 100 * one).unwrap().len(), 100);
    let error = parse_within(&lists(101), 100 * one).unwrap_err().to_string();
    assert!(error.contains(&format!("more than {} bytes", 100 * one)), "{error}");
    for elements in [&b"\x80\x02](NNNNe."[..], b"\x80\x02}(NNNNu.", b"\x80\x04\x8f(NNNN\x90.", b"\x80\x02(NNNNt."] {
        let needed = (1..2000).find(|bytes| parse_within(elements, *bytes).is_ok()).unwrap();
        assert!(needed > 4 * 12 + 5 * size_of::<Node>() as u64, "{needed}");
    }
    // Seven million empty lists are more than anybody saves; twenty million integers are not.
    parse(&lists(7_500_000)).unwrap_err();
    parse(&repeated(b"\x80\x02](", b"J\xff\xff\xff\x7f", 20_000_000, b"e.")).unwrap();
}

#[test]
fn expanding_graphs_are_refused() {
    let tuples = |levels| repeated(b"\x80\x02)", b"2\x86", levels, b".");
    parse(&tuples(20)).unwrap();
    for pickle in [
        tuples(60),
        repeated(b"\x80\x02)", b"2\x85\x86", 60, b"."),
        repeated(b"\x80\x04)", b"2\x86q\0(h\0h\0\x91", 60, b"."),
        // As keys of a dict, and as arguments of a class.
        repeated(b"\x80\x02})", b"2\x86", 60, b"Ns."),
        repeated(b"\x80\x02ccollections\nX\nq\0)", b"2\x86q\x01h\0h\x01\x81", 60, b"."),
    ] {
        let error = parse(&pickle).unwrap_err().to_string();
        assert!(error.contains("268435456"), "{error}");
    }
    // A list counts once, however often it is referenced.
    parse(&repeated(b"\x80\x02]", b"2q\0]h\0ah\0a", 60, b".")).unwrap();
}
