//! The life of items: attached, created, put and deleted, in one folder or several.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use deepnvme_io::mem::Region;
use deepnvme_swap::{AttachedRange, Error, Swapper, SwapperOptions};

use crate::common::{KIB, bytes_of, engine, never, random, read, world};

#[test]
fn attached_items_are_read_in_place_and_never_written() {
    let world = world(engine(), 8 * 4096, |_| {});
    let swapper = &world.swapper;
    let (path, data) = (world.folder.path().join("weights"), random(5, 60_000));
    std::fs::write(&path, &data).unwrap();
    let target = path.clone().into();
    let attach = |key: &str, offset: usize, bytes| {
        swapper.attach(
            key,
            "a label",
            &AttachedRange { target: &target, offset: offset as u64, bytes, element_bytes: 8 },
            &mut never(),
        )
    };
    for (index, offset) in [0, 4096, 12_344, 20_001].into_iter().enumerate() {
        attach(&index.to_string(), offset, 17_000).unwrap();
    }
    for _ in 0..2 {
        for (index, offset) in [0, 4096, 12_344, 20_001].into_iter().enumerate() {
            let borrowed = swapper.borrow(&index.to_string(), false, &mut never()).unwrap();
            assert!(bytes_of(&borrowed) == data[offset..offset + 17_000]);
            assert_eq!(borrowed.offset().unwrap() % 8, 0, "elements are aligned");
        }
    }
    assert!(matches!(swapper.borrow("1", true, &mut never()), Err(Error::ReadOnly { .. })));
    assert!(matches!(attach("beyond", 50_000, 10_001), Err(Error::Invalid(_))));
    assert!(swapper.stats().bytes_written == 0 && swapper.stats().stored_bytes == 0);
    let part = swapper.extents("2", &mut never()).unwrap().remove(0);
    assert_eq!((part.path.as_path(), part.offset, part.bytes), (path.as_path(), 12_344, 17_000));
    swapper.put("1", &Region::from_vec(vec![1; 10])).unwrap();
    assert_eq!(read(swapper, "1"), [1; 10]);
    assert!(std::fs::read(&path).unwrap() == data);
}

#[test]
fn too_large_items_name_the_memory_needed() {
    let world = world(engine(), 4 * 4096, |_| {});
    let Err(Error::TooLarge { enough_bytes, .. }) =
        world.swapper.put("large", &Region::from_vec(vec![0; 5 * 4096 - 1]))
    else {
        panic!()
    };
    assert_eq!(enough_bytes, 5 * 4096);
    assert!(Swapper::new(engine(), &SwapperOptions::new(world.folder.path(), 4095)).is_err());
}

#[test]
fn deleting_an_item_frees_its_space_at_once() {
    let world = world(engine(), 4 * 4096, |_| {});
    for turn in 0..200_u64 {
        world.swapper.put("a", &Region::from_vec(random(turn, 3 * 4096))).unwrap();
        world.swapper.put("b", &Region::from_vec(random(turn, 2 * 4096))).unwrap();
        world.swapper.delete("a").unwrap();
        world.swapper.delete("b").unwrap();
        assert!(world.swapper.stats().file_bytes <= 16 * 4096);
    }
}

#[test]
fn several_folders_stripe_the_items() {
    let second = tempfile::tempdir().unwrap();
    let world = world(engine(), 8 * 4096, |options| {
        options.folders.push(second.path().to_path_buf());
        options.stripe_bytes = 4096;
    });
    for key in 0..8_u64 {
        world.swapper.put(&key.to_string(), &Region::from_vec(random(key, 20 * KIB))).unwrap();
    }
    assert!(world.swapper.extents("0", &mut never()).unwrap().len() > 1);
    for key in 0..8_u64 {
        assert!(read(&world.swapper, &key.to_string()) == random(key, 20 * KIB));
    }
}

#[test]
fn created_items_exist_only_after_their_commit() {
    let world = world(engine(), 256 * KIB, |_| {});
    let swapper = &world.swapper;
    let (first, second) = (random(1, 20_000), random(2, 20_000));
    for bytes in [20_000, 30_000] {
        // Over no item, and over one of the same or another size.
        swapper.create("a", bytes, &mut never()).unwrap().target().copy_from_slice(0, &first);
        assert!(matches!(swapper.borrow("a", false, &mut never()), Err(Error::NotFound { .. })));
        swapper.put("a", &Region::from_vec(first.clone())).unwrap();
        drop(swapper.create("a", bytes, &mut never()).unwrap());
        assert!(!swapper.contains("a") && swapper.keys().is_empty());
    }
    let filled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let borrowed = swapper.create("a", 20_000, &mut never()).unwrap();
        borrowed.target().copy_from_slice(0, &first);
        panic!("half way");
    }));
    assert!(filled.is_err() && !swapper.contains("a"));
    let borrowed = swapper.create("a", 20_000, &mut never()).unwrap();
    borrowed.target().copy_from_slice(0, &second);
    borrowed.commit_as("bytes of mine");
    assert_eq!(&*swapper.borrow("a", false, &mut never()).unwrap().label(), "bytes of mine");
    assert_eq!(read(swapper, "a"), second);
    swapper.flush(None, &mut never()).unwrap();
    assert_eq!((swapper.stats().items, swapper.stats().stored_bytes), (1, 20_480), "all other space was freed");
}

/// The descriptors of this process whose files lie, or lay, in a folder.
fn descriptors_in(folder: &std::path::Path) -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .filter(|path| path.starts_with(folder))
        .count()
}

#[test]
fn a_closed_swapper_has_no_file_open() {
    for is_named in [false, true] {
        let world = world(engine(), 4 * 4096, |options| options.is_named = is_named);
        let (swapper, folder) = (&world.swapper, world.folder.path());
        std::fs::write(folder.join("weights"), random(1, 4096)).unwrap();
        let target = folder.join("weights").into();
        let range = AttachedRange { target: &target, offset: 0, bytes: 4096, element_bytes: 1 };
        swapper.attach("attached", "", &range, &mut never()).unwrap();
        for key in ["memory", "disk"] {
            swapper.put(key, &Region::from_vec(random(2, 4096))).unwrap();
        }
        swapper.flush(None, &mut never()).unwrap();
        assert!(descriptors_in(folder) >= 2);
        let in_memory = swapper.borrow("memory", false, &mut never()).unwrap();
        let attached = swapper.borrow("attached", false, &mut never()).unwrap();
        swapper.close();
        assert_eq!(descriptors_in(folder), 0);
        assert!(bytes_of(&in_memory) == random(2, 4096) && bytes_of(&attached) == random(1, 4096));
        let closed = [
            swapper.put("new", &Region::from_vec(vec![1; 4096])),
            swapper.attach("again", "", &range, &mut never()).map(|_| ()),
            swapper.extents("disk", &mut never()).map(|_| ()),
            swapper.prefetch([]),
            swapper.schedule(["disk"], true),
            swapper.delete("disk"),
            swapper.flush(None, &mut never()),
            swapper.check_open(),
        ];
        assert!(closed.iter().all(|result| matches!(result, Err(Error::Closed(_)))), "{closed:?}");
        assert!(swapper.keys().is_empty() && !swapper.contains("disk"));
        drop((in_memory, attached));
        swapper.close();
        assert_eq!(descriptors_in(folder), 0);
    }
}
