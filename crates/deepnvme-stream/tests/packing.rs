//! A packed folder has the same weights in another layout and encoding, and appears complete or not at all.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_checkpoint::read::{FileMetadata, Reader};
use deepnvme_checkpoint::write::{Save, SaveOptions, Tensor};
use deepnvme_checkpoint::{Error, Progress, Result};
use deepnvme_codec::quant::{CodeType, Scheme, dequantise, quantise};
use deepnvme_codec::{Float, cast};
use deepnvme_file::replace::PrivateFolder;
use deepnvme_file::{StripeSet, Target, VersionedFile};
use deepnvme_format::{Dtype, safetensors, safetensors::TensorSpec};
use deepnvme_io::backend::BackendKind;
use deepnvme_io::mem::{Buffer, Region};
use deepnvme_io::{BackendFactory, Config, Engine};
use deepnvme_stream::pack::{EncodingMode, PACKED_NAME, PLAIN_NAME, PackOptions, PackOutcome, Packer, tensors};
use deepnvme_stream::{Form, LayerGroup, SlotClass, StreamPlan, Streamer};
use deepnvme_testkit::faults::{FaultPlan, Faults};
use proptest::prelude::*;

/// Floats like those of a model, in any type.
fn weights(float: Float, count: usize, random: &mut fastrand::Rng) -> Vec<u8> {
    let wide: Vec<u8> =
        (0..count).flat_map(|_| ((random.f32() + random.f32() + random.f32() - 1.5) * 0.05).to_le_bytes()).collect();
    let mut bytes = vec![0; count * float.bytes()];
    cast::convert(Float::F32, float, &wide, &mut bytes).unwrap();
    bytes
}

/// A model's folder, and the bytes of its tensors.
struct Model {
    folder: tempfile::TempDir,
    tensors: HashMap<String, (Dtype, Vec<u64>, Vec<u8>)>,
}

impl Model {
    fn new(engine: &Arc<Engine>, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut model = Self { folder: tempfile::tempdir().unwrap(), tensors: HashMap::new() };
        let mut shards = [Vec::new(), Vec::new()];
        for (name, dtype, shape) in [
            ("model.embed.weight", Dtype::Bf16, vec![700, 200]),
            ("model.layers.0.mlp.weight", Dtype::Bf16, vec![300, 333]),
            ("model.layers.10.mlp.weight", Dtype::F32, vec![400, 333]),
            ("model.layers.2.mlp.weight", Dtype::F16, vec![random.u64(200..700), 333]),
            ("model.layers.2.norm.weight", Dtype::F16, vec![333]),
            ("model.layers.0.norm.weight", Dtype::Bf16, vec![333]),
        ] {
            let count = shape.iter().product::<u64>() as usize;
            let bytes = weights(float_of(dtype).unwrap(), count, &mut random);
            model.tensors.insert(name.into(), (dtype, shape, bytes));
        }
        let counts: Vec<u8> = (0..8000).map(|_| random.u8(..)).collect();
        model.tensors.insert("model.counts".into(), (Dtype::I64, vec![1000], counts));
        model.tensors.insert("model.nothing".into(), (Dtype::F32, vec![0, 3], Vec::new()));
        for (name, (dtype, shape, bytes)) in &model.tensors {
            let spec = TensorSpec { name: name.clone(), dtype: *dtype, shape: shape.clone() };
            shards[random.usize(0..2)].push(Tensor { spec, data: Region::from_vec(bytes.clone()).into() });
        }
        let mut index = HashMap::new();
        for (number, shard) in shards.into_iter().enumerate() {
            let name = format!("model-{number}.safetensors");
            shard.iter().for_each(|tensor| drop(index.insert(tensor.spec.name.clone(), name.clone())));
            let path = model.path().join(name);
            let metadata = vec![("format".into(), "pt".into())];
            let save = Save::safetensors(&path, shard, metadata, SaveOptions::default()).unwrap();
            save.run(Arc::clone(engine), &Target::from(&path), Arc::default()).unwrap();
        }
        let entries: Vec<String> = index.iter().map(|(name, file)| format!("{name:?}: {file:?}")).collect();
        let index = format!(r#"{{"metadata": {{}}, "weight_map": {{{}}}}}"#, entries.join(","));
        fs::write(model.path().join("model.safetensors.index.json"), index).unwrap();
        fs::write(model.path().join("config.json"), r#"{"model_type": "llama", "dtype": "bfloat16"}"#).unwrap();
        fs::create_dir(model.path().join("1_Pooling")).unwrap();
        fs::write(model.path().join("1_Pooling/config.json"), "{}").unwrap();
        model
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }
}

fn engine(plan: Option<FaultPlan>) -> Arc<Engine> {
    let config = Config { workers: 2, ..Config::default() };
    let Some(plan) = plan else { return Arc::new(Engine::new(config).unwrap()) };
    let wrap = Faults::new(plan);
    let factory: BackendFactory =
        Arc::new(move |setup| Ok(Box::new(wrap.wrap(deepnvme_io::backend::open(BackendKind::Threads, setup)?))));
    Arc::new(Engine::with_backends(config, factory).unwrap())
}

/// Returns an engine, a model, and a folder for packed models.
fn set_up(seed: u64) -> (Arc<Engine>, Model, tempfile::TempDir) {
    let engine = engine(None);
    let model = Model::new(&engine, seed);
    (engine, model, tempfile::tempdir().unwrap())
}

/// Saves one tensor, `h.0.weight`, as a model.
fn save_tensor(engine: &Arc<Engine>, path: &Path, shape: &[u64], bytes: Vec<u8>, options: SaveOptions) {
    let spec = TensorSpec { name: "h.0.weight".into(), dtype: Dtype::F32, shape: shape.to_vec() };
    let tensors = vec![Tensor { spec, data: Region::from_vec(bytes).into() }];
    let save = Save::safetensors(path, tensors, Vec::new(), options).unwrap();
    save.run(Arc::clone(engine), &Target::from(path), Arc::default()).unwrap();
}

/// Creates folders for stripes.
fn disks(folder: &Path) -> [PathBuf; 2] {
    let disks = [folder.join("a"), folder.join("b")];
    disks.iter().for_each(|disk| fs::create_dir(disk).unwrap());
    disks
}

fn open_packer(engine: &Arc<Engine>, source: &Path, target: &Path, mode: EncodingMode) -> Result<Packer> {
    Packer::new(engine, source, target, PackOptions { mode, disks: Vec::new() })
}

fn run(engine: &Arc<Engine>, model: &Model, to: &Path, mode: EncodingMode, disks: &[PathBuf]) -> Result<PackOutcome> {
    let options = PackOptions { mode, disks: disks.to_vec() };
    Packer::new(engine, model.path(), to, options)?.run(&Progress::default())
}

/// Loads all tensors of a packed file as a model would. Returns the encoding of each as well.
fn unpacked(engine: &Arc<Engine>, target: &Target) -> HashMap<String, (Dtype, Vec<u64>, Vec<u8>, bool)> {
    let mut reader = Reader::open(engine, target).unwrap();
    assert!(reader.has_checksums(), "the new file has checksums");
    reader.verify_all(engine, &Progress::default()).unwrap();
    let FileMetadata::Safetensors { header } = reader.file_metadata() else { panic!("it is a safetensors file") };
    let mut found = HashMap::new();
    for tensor in &header.tensors {
        let bytes = bytes_of(engine, &reader, tensor);
        found.insert(tensor.name.clone(), (tensor.dtype, tensor.shape.clone(), bytes, false));
    }
    for packed in tensors(header, 0).unwrap() {
        let Form::Parts { bytes, starts, .. } = &packed.stored.form else { panic!("it has parts") };
        let slot_bytes = bytes.next_multiple_of(4096);
        let arena = Buffer::zeroed(slot_bytes).unwrap().into_region();
        let memory = arena.region();
        let conversions = packed.stored.conversions(0..*bytes, 0, packed.stored.float).unwrap();
        assert!(starts.len() > 2 || *bytes <= 256 << 10, "it is cut into parts");
        let group = LayerGroup { conversions, ..LayerGroup::default() };
        let class = SlotClass { slots: 1, prefetch: 0, slot_bytes, shares_memory: false };
        let source = VersionedFile::open(target.clone()).unwrap();
        let plan =
            StreamPlan { files: vec![source], groups: vec![group], classes: vec![class], ..StreamPlan::default() };
        let streamer = Streamer::new(Arc::clone(engine), plan, arena).unwrap();
        let at = streamer.acquire(0, None).unwrap().unwrap();
        let mut whole = vec![0; *bytes];
        memory.copy_to_slice(at, &mut whole);
        found.insert(packed.name, (packed.dtype, packed.shape, whole, true));
    }
    found
}

/// Reads the bytes of a tensor.
fn bytes_of(engine: &Arc<Engine>, reader: &Reader, tensor: &safetensors::Tensor) -> Vec<u8> {
    let target = Buffer::zeroed((tensor.bytes as usize).max(1)).unwrap().into_region();
    let memory = target.region();
    let (target, _rest) = target.split_at(tensor.bytes as usize);
    engine.read(reader.file(), tensor.offset, target).unwrap().wait().1.unwrap();
    let mut bytes = vec![0; tensor.bytes as usize];
    memory.copy_to_slice(0, &mut bytes);
    bytes
}

/// A tensor after quantising and dequantising.
fn rounded(code: CodeType, group: usize, float: Float, columns: usize, bytes: &[u8]) -> Vec<u8> {
    let scheme = Scheme { code, group: std::num::NonZeroUsize::new(group), scale: Float::Bf16 };
    let elements = bytes.len() / float.bytes();
    let mut codes = vec![0; elements];
    let mut scales = vec![0; scheme.scales(elements / columns, columns).unwrap() * 2];
    quantise(scheme, columns, (float, bytes), &mut codes, &mut scales).unwrap();
    let mut again = vec![0; bytes.len()];
    dequantise(scheme, columns, &codes, &scales, (float, &mut again)).unwrap();
    again
}

fn float_of(dtype: Dtype) -> Option<Float> {
    match dtype {
        Dtype::Bf16 => Some(Float::Bf16),
        Dtype::F16 => Some(Float::F16),
        Dtype::F32 => Some(Float::F32),
        _ => None,
    }
}

/// Other entries of a folder than those of a packed model.
fn leftovers(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with('.')).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn every_mode_keeps_the_weights(seed: u64, is_striped: bool, group in 1..200usize) {
        let (engine, model, out) = set_up(seed);
        let disks: Vec<PathBuf> = (0..3).map(|disk| out.path().join(format!("disk{disk}"))).collect();
        disks.iter().for_each(|disk| fs::create_dir(disk).unwrap());
        let disks = if is_striped { disks } else { Vec::new() };
        let modes = [
            EncodingMode::Auto, EncodingMode::Lossless, EncodingMode::Keep, EncodingMode::Cast(Float::F32), EncodingMode::Quantised(CodeType::Int8, group),
            EncodingMode::Quantised(CodeType::F8E4m3, group),
        ];
        for (number, mode) in modes.into_iter().enumerate() {
            let folder = out.path().join(format!("packed{number}"));
            let packed = run(&engine, &model, &folder, mode, &disks).unwrap();
            prop_assert_eq!(packed.tensors, model.tensors.len());
            let target = if is_striped {
                Target::Stripes(StripeSet::from_manifest(&packed.file).unwrap())
            } else {
                Target::Path(packed.file.clone())
            };
            let is_plain = matches!(mode, EncodingMode::Keep | EncodingMode::Cast(_)) || packed.encoded == 0;
            let name = if is_plain { PLAIN_NAME } else { PACKED_NAME };
            prop_assert!(packed.file.file_name().unwrap().to_string_lossy().starts_with(name));
            let found = unpacked(&engine, &target);
            prop_assert_eq!(found.len(), model.tensors.len());
            for (name, (dtype, shape, bytes)) in &model.tensors {
                let (new_dtype, new_shape, new_bytes, is_encoded) = &found[name];
                let float = float_of(*dtype);
                let expected = match (mode, float) {
                    (EncodingMode::Cast(to), Some(from)) => {
                        let mut cast_bytes = vec![0; bytes.len() / from.bytes() * to.bytes()];
                        cast::convert(from, to, bytes, &mut cast_bytes).unwrap();
                        prop_assert_eq!(float_of(*new_dtype), Some(to));
                        cast_bytes
                    }
                    (EncodingMode::Quantised(code, group), Some(float)) if *is_encoded => {
                        prop_assert_eq!(new_dtype, dtype);
                        rounded(code, group, float, *shape.last().unwrap() as usize, bytes)
                    }
                    _ => {
                        prop_assert_eq!(new_dtype, dtype);
                        bytes.clone()
                    }
                };
                prop_assert_eq!(new_shape, shape);
                prop_assert!(new_bytes == &expected, "{} in {:?}", name, mode);
                if mode == EncodingMode::Lossless && shape.len() == 2 && !bytes.is_empty() {
                    prop_assert!(is_encoded, "{} gains", name);
                }
            }
            // Layers are contiguous; encoded ones begin at pages.
            let reader = Reader::open(&engine, &target).unwrap();
            let at = |name: &str| reader.extents().iter().find(|extent| extent.name == name).unwrap().data_offset;
            prop_assert!(at("model.layers.0.norm.weight") < at("model.layers.2.norm.weight"));
            prop_assert!(at("model.layers.2.mlp.weight") < at("model.layers.10.mlp.weight"));
            if mode == EncodingMode::Lossless {
                prop_assert_eq!(at("model.layers.10.mlp.weight") % 4096, 0, "nothing plain is in that layer");
                prop_assert_eq!(at("model.layers.2.norm.weight") % 4096, 0);
            }
            prop_assert!(folder.join("1_Pooling/config.json").is_file());
            prop_assert!(!folder.join("model.safetensors.index.json").exists());
            let config = fs::read_to_string(folder.join("config.json")).unwrap();
            prop_assert_eq!(config.contains("float32"), mode == EncodingMode::Cast(Float::F32));
        }
        prop_assert_eq!(leftovers(out.path()), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_failing_disk_leaves_nothing_behind(seed: u64, eio in 1..60u32, is_striped: bool) {
        let model = Model::new(&engine(None), seed);
        let engine = engine(Some(FaultPlan { seed, eio, short: 200, reorder: true, ..FaultPlan::default() }));
        let out = tempfile::tempdir().unwrap();
        let disks = if is_striped { disks(out.path()).to_vec() } else { Vec::new() };
        let target = out.path().join("packed");
        match run(&engine, &model, &target, EncodingMode::Lossless, &disks) {
            Ok(packed) => prop_assert!(packed.file.is_file()),
            Err(error) => {
                prop_assert!(matches!(error, Error::Io(_)), "{error}");
                prop_assert!(!target.exists());
                prop_assert_eq!(leftovers(out.path()), Vec::<PathBuf>::new());
                for disk in &disks {
                    prop_assert_eq!(fs::read_dir(disk).unwrap().count(), 0);
                }
            }
        }
    }
}

#[test]
fn existing_folders_are_left_alone_whatever_their_names() {
    let (engine, model, out) = set_up(3);
    let target = out.path().join("packed");
    fs::create_dir(&target).unwrap();
    fs::write(target.join("mine"), "mine").unwrap();
    let refused = run(&engine, &model, &target, EncodingMode::Keep, &[]).unwrap_err();
    assert!(refused.to_string().contains("the folder is not empty"), "{refused}");
    assert_eq!(fs::read(target.join("mine")).unwrap(), b"mine");
    fs::remove_file(target.join("mine")).unwrap();
    for leads_to in [&target, &out.path().join("nowhere")] {
        let link = out.path().join("link");
        std::os::unix::fs::symlink(leads_to, &link).unwrap();
        let refused = run(&engine, &model, &link, EncodingMode::Keep, &[]).unwrap_err();
        assert!(refused.to_string().contains("it is a symbolic link"), "{refused}");
        fs::remove_file(&link).unwrap();
    }

    // Foreign folders with names that unfinished ones have or had.
    let foreign =
        [".packed.deepnvme-pack-1", ".packed.deepnvme-tmp-1-0-0123456789abcdef"].map(|name| out.path().join(name));
    for folder in &foreign {
        fs::create_dir(folder).unwrap();
        fs::write(folder.join(".deepnvme-lock"), "mine").unwrap();
    }
    let living = PrivateFolder::new(&target).unwrap();
    run(&engine, &model, &target, EncodingMode::Keep, &[]).unwrap();
    assert!(living.path().exists() && target.join(PLAIN_NAME).is_file());
    assert!(foreign.iter().all(|folder| fs::read(folder.join(".deepnvme-lock")).unwrap() == b"mine"));
}

#[test]
fn a_source_that_changes_after_it_was_opened_is_not_packed() {
    let folder = tempfile::tempdir().unwrap();
    let (engine, source) = (engine(None), folder.path().join("model.safetensors"));
    let bytes = weights(Float::F32, 1 << 18, &mut fastrand::Rng::with_seed(4));
    // Without checksums nothing else notices.
    let options = SaveOptions { has_checksums: false, ..SaveOptions::default() };
    save_tensor(&engine, &source, &[1 << 18], bytes, options);
    for mode in [EncodingMode::Keep, EncodingMode::Lossless, EncodingMode::Quantised(CodeType::Int8, 64)] {
        let target = folder.path().join("packed");
        let packer = open_packer(&engine, &source, &target, mode).unwrap();
        let file = fs::File::options().write(true).open(&source).unwrap();
        file.write_all_at(&[1, 2, 3, 4], 500_000).unwrap();
        drop(file);
        let failed = packer.run(&Progress::default());
        assert!(matches!(&failed, Err(Error::Changed { path }) if *path == source), "{failed:?}");
        assert!(!target.exists());
    }
}

#[test]
fn a_model_of_empty_tensors_is_packed() {
    let folder = tempfile::tempdir().unwrap();
    let (engine, source) = (engine(None), folder.path().join("model.safetensors"));
    save_tensor(&engine, &source, &[0, 7], Vec::new(), SaveOptions::default());
    let modes =
        [EncodingMode::Auto, EncodingMode::Keep, EncodingMode::Lossless, EncodingMode::Quantised(CodeType::Int8, 64)];
    for (number, mode) in modes.into_iter().enumerate() {
        let target = folder.path().join(format!("packed-{number}"));
        let packed = open_packer(&engine, &source, &target, mode).unwrap().run(&Progress::default()).unwrap();
        let all = unpacked(&engine, &Target::from(&packed.file));
        assert_eq!(all["h.0.weight"], (Dtype::F32, vec![0, 7], Vec::new(), false));
    }
}

#[test]
fn packings_on_the_same_disks_leave_each_other_alone() {
    let (engine, model, out) = set_up(5);
    let disks = disks(out.path());
    let packer = |target: &Path| {
        let options = PackOptions { mode: EncodingMode::Lossless, disks: disks.to_vec() };
        Packer::new(&engine, model.path(), target, options).unwrap()
    };
    let whole = |packed: &PackOutcome| {
        let set = StripeSet::from_manifest(&packed.file).unwrap();
        assert_eq!(unpacked(&engine, &Target::Stripes(set)).len(), model.tensors.len());
    };
    let files = || disks.iter().map(|disk| fs::read_dir(disk).unwrap().count()).sum::<usize>();
    // Both see that nothing exists yet.
    let target = out.path().join("packed");
    let [first, second] = [packer(&target), packer(&target)];
    let packed = first.run(&Progress::default()).unwrap();
    let before = files();
    assert!(second.run(&Progress::default()).is_err());
    whole(&packed);
    assert_eq!(files(), before, "the second leaves nothing");
    // Another folder of this name is another model.
    fs::create_dir(out.path().join("other")).unwrap();
    let other = packer(&out.path().join("other/packed")).run(&Progress::default()).unwrap();
    whole(&packed);
    whole(&other);
}

#[test]
fn files_left_out_are_reported() {
    let (engine, model, out) = set_up(6);
    let path = |name: &str| model.path().join(name);
    fs::write(path("pytorch_model.bin"), "other weights").unwrap();
    fs::write(path("1_Pooling/model.safetensors"), "other weights").unwrap();
    fs::write(path(".gitattributes"), "hidden").unwrap();
    fs::create_dir_all(path("a/b/c/d/e")).unwrap();
    fs::write(path("a/b/c/d/deep.txt"), "deep").unwrap();
    fs::write(path("a/b/c/d/e/deeper.txt"), "deeper").unwrap();
    fs::File::create(path("video.mp4")).unwrap().set_len((256 << 20) + 1).unwrap();
    symlink("nowhere", path("dangling.json")).unwrap();
    symlink("round", path("round")).unwrap();
    symlink("config.json", path("linked.json")).unwrap();
    symlink("1_Pooling", path("2_Pooling")).unwrap();
    let _socket = UnixListener::bind(path("socket")).unwrap();

    let packed = run(&engine, &model, &out.path().join("packed"), EncodingMode::Keep, &[]).unwrap();
    let left_out: Vec<(&str, &str)> =
        packed.left_out.iter().map(|file| (file.path.to_str().unwrap(), file.reason)).collect();
    let expected = [
        (".gitattributes", "it is hidden"),
        ("1_Pooling/model.safetensors", "it contains other weights"),
        ("2_Pooling", "it is a link to a folder"),
        ("a/b/c/d/e", "it is nested too deeply"),
        ("dangling.json", "it is a dangling link"),
        ("pytorch_model.bin", "it contains other weights"),
        ("round", "it is a dangling link"),
        ("socket", "it is not a regular file"),
        ("video.mp4", "it exceeds 256 MiB"),
    ];
    assert_eq!(left_out, expected);
    assert_eq!(packed.copied, 4);
    for name in ["config.json", "1_Pooling/config.json", "a/b/c/d/deep.txt", "linked.json"] {
        assert_eq!(fs::read(out.path().join("packed").join(name)).unwrap(), fs::read(path(name)).unwrap());
    }
}

#[test]
fn a_folder_that_goes_away_is_an_error() {
    let (engine, model, out) = set_up(7);
    let target = out.path().join("packed");
    let packer = open_packer(&engine, model.path(), &target, EncodingMode::Keep).unwrap();
    let (here, there) = (model.path().to_path_buf(), out.path().join("moved"));
    fs::rename(&here, &there).unwrap();
    let gone = packer.run(&Progress::default()).unwrap_err();
    assert!(gone.to_string().contains(here.to_str().unwrap()), "{gone}");
    assert!(!target.exists() && leftovers(out.path()).is_empty());
    fs::rename(&there, &here).unwrap();
}

#[test]
fn a_packed_model_has_the_permissions_of_the_model() {
    let (engine, model, out) = set_up(8);
    let disks = disks(out.path());
    let allow = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    allow(&model.path().join("model-0.safetensors"), 0o640);
    allow(&model.path().join("model-1.safetensors"), 0o604);
    allow(&model.path().join("config.json"), 0o600);
    allow(&model.path().join("1_Pooling"), 0o500);
    for (name, disks) in [("single", &[][..]), ("striped", &disks[..])] {
        let packed = run(&engine, &model, &out.path().join(name), EncodingMode::Keep, disks).unwrap();
        assert_eq!(mode(&packed.file), 0o600);
        assert_eq!(mode(&out.path().join(name).join("config.json")), 0o600);
        assert_eq!(mode(&out.path().join(name).join("1_Pooling")), 0o700);
    }
    for part in disks.iter().flat_map(|disk| fs::read_dir(disk).unwrap()) {
        assert_eq!(mode(&part.unwrap().path()), 0o600);
    }
    allow(&model.path().join("1_Pooling"), 0o700);
}

#[test]
fn damaged_packed_and_cancelled_models_are_refused() {
    let (engine, model, out) = set_up(4);
    let target = out.path().join("packed");
    let stopped = Progress::default();
    stopped.stop();
    let packer = open_packer(&engine, model.path(), &target, EncodingMode::Keep).unwrap();
    assert!(packer.estimate().bytes > 0 && packer.estimate().file_ranges >= 1.0 && packer.estimate().layers == 3);
    assert!(matches!(packer.run(&stopped), Err(Error::Interrupted)));
    assert!(!target.exists());

    run(&engine, &model, &target, EncodingMode::Lossless, &[]).unwrap();
    let again = open_packer(&engine, &target.join(PACKED_NAME), &out.path().join("again"), EncodingMode::Keep);
    let again = again.err().unwrap();
    assert!(again.to_string().contains("packed already"), "{again}");

    let shard = model.path().join("model-0.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shard, bytes).unwrap();
    let damaged = run(&engine, &model, &out.path().join("other"), EncodingMode::Keep, &[]).unwrap_err();
    assert!(matches!(damaged, Error::Damaged { .. }), "{damaged}");
    assert!(!out.path().join("other").exists());
}

#[test]
fn an_unencodable_weight_is_an_error_with_its_name() {
    let engine = engine(None);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut bytes = weights(Float::F32, 200 * 200, &mut fastrand::Rng::with_seed(1));
    bytes[80_000..80_004].copy_from_slice(&f32::INFINITY.to_le_bytes());
    save_tensor(&engine, &path, &[200, 200], bytes, SaveOptions::default());
    let packer =
        open_packer(&engine, &path, &folder.path().join("new"), EncodingMode::Quantised(CodeType::Int8, 64)).unwrap();
    let refused = packer.run(&Progress::default()).unwrap_err().to_string();
    assert!(refused.contains("h.0.weight") && refused.contains("infinite"), "{refused}");
    assert!(!folder.path().join("new").exists());
}
