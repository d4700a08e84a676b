use super::*;
use proptest::prelude::*;

fn with_header(json: &str, data: usize) -> Vec<u8> {
    let total = (8 + json.len()).next_multiple_of(4096);
    let mut file = ((total - 8) as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json.as_bytes());
    file.resize(total, b' ');
    file.resize(total + data, 0);
    file
}

type Shapes = BTreeMap<String, (Dtype, Vec<u64>)>;

fn shapes() -> impl Strategy<Value = Shapes> {
    let dtype = proptest::sample::select(Dtype::ALL.to_vec());
    let shape = proptest::collection::vec(0_u64..7, 0..4);
    proptest::collection::btree_map(".{0,12}", (dtype, shape), 0..6)
        .prop_filter("reserved", |map| !map.contains_key(METADATA))
}

fn tensors(shapes: &Shapes) -> Vec<(&str, Dtype, &[u64])> {
    shapes.iter().map(|(name, (dtype, shape))| (name.as_str(), *dtype, shape.as_slice())).collect()
}

fn data_bytes(shapes: &Shapes) -> usize {
    shapes.values().map(|(dtype, shape)| (shape.iter().product::<u64>() * dtype.bytes()) as usize).sum()
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = parse_header(&bytes);
        let _ = Manifest::parse(&bytes);
        let _ = parse_header(&with_header(&String::from_utf8_lossy(&bytes), 64));
    }

    #[test]
    fn a_header_reads_back_and_the_public_library_agrees(shapes in shapes()) {
        let mut file = encode_header(&tensors(&shapes)).unwrap();
        prop_assert_eq!(file.len() % 4096, 0);
        file.resize(file.len() + data_bytes(&shapes), 1);

        let parsed = parse_header(&file).unwrap();
        prop_assert_eq!(parsed.len(), shapes.len());
        let public = safetensors::SafeTensors::deserialize(&file).unwrap();
        prop_assert_eq!(public.len(), shapes.len());
        for tensor in parsed {
            prop_assert_eq!(&(tensor.dtype, tensor.shape.clone()), &shapes[&tensor.name]);
            let view = public.tensor(&tensor.name).unwrap();
            prop_assert_eq!(format!("{:?}", view.dtype()), tensor.dtype.name());
            prop_assert_eq!(view.data(), &file[tensor.begin as usize..tensor.end as usize]);
            let shape: Vec<u64> = view.shape().iter().map(|&axis| axis as u64).collect();
            prop_assert_eq!(shape, tensor.shape);
        }
    }

    #[test]
    fn tensors_of_a_mangled_header_still_tile_the_file(
        shapes in shapes(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut file = encode_header(&tensors(&shapes)).unwrap();
        file.resize(file.len() + data_bytes(&shapes), 1);
        let written = file.iter().rposition(|&b| b == b'}').unwrap();
        let at = at.index(written + 1);
        file[at] = byte;
        if let Ok(parsed) = parse_header(&file) {
            let ends = parsed.last().map_or(file.len() as u64, |tensor| tensor.end);
            prop_assert_eq!(ends, file.len() as u64);
            prop_assert!(parsed.windows(2).all(|pair| pair[0].end == pair[1].begin));
        }
    }

    #[test]
    fn a_manifest_reads_back_and_any_changed_byte_is_refused(
        metadata in proptest::collection::btree_map(".{0,8}", ".{0,8}", 0..4),
        files in proptest::collection::btree_map("[a-z/.]{1,12}", (any::<u64>(), any::<u128>()), 0..4),
        at in any::<prop::sample::Index>(),
        flip in 1_u8..=255,
    ) {
        let files = files.into_iter()
            .map(|(name, (bytes, sum))| (name, FileEntry { bytes, xxh3_128: Checksum(sum) }))
            .collect();
        let manifest = Manifest { files, metadata, ..Manifest::default() };
        let (mut bytes, checksum) = manifest.encode().unwrap();
        prop_assert_eq!(Manifest::parse(&bytes).unwrap(), (manifest, checksum));
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        prop_assert!(Manifest::parse(&bytes).is_err());
    }
}

#[test]
fn each_malformed_header_has_its_own_error() {
    let tensor =
        |begin: u64, end: u64| format!(r#"{{"dtype":"F32","shape":[2],"data_offsets":[{begin},{end}]}}"#);
    let file = |a: String, b: String, data| with_header(&format!(r#"{{"a":{a},"b":{b}}}"#), data);

    assert!(parse_header(&file(tensor(0, 8), tensor(8, 16), 16)).is_ok());
    let overlap = parse_header(&file(tensor(0, 8), tensor(4, 12), 12)).unwrap_err();
    assert!(matches!(overlap, FormatError::Offsets { expected: (8, 16), got: (4, 12), .. }), "{overlap}");
    let gap = parse_header(&file(tensor(0, 8), tensor(12, 20), 20)).unwrap_err();
    assert!(matches!(gap, FormatError::Offsets { .. }), "{gap}");
    let shape = parse_header(&file(tensor(0, 4), tensor(4, 12), 12)).unwrap_err();
    assert!(matches!(shape, FormatError::Offsets { expected: (0, 8), .. }), "{shape}");
    let short = parse_header(&file(tensor(0, 8), tensor(8, 16), 15)).unwrap_err();
    assert!(matches!(short, FormatError::Data { expected: 16, got: 15 }), "{short}");
    let long = parse_header(&file(tensor(0, 8), tensor(8, 16), 17)).unwrap_err();
    assert!(matches!(long, FormatError::Data { expected: 16, got: 17 }), "{long}");

    let twice = with_header(&format!(r#"{{"a":{},"a":{}}}"#, tensor(0, 8), tensor(8, 16)), 16);
    assert!(matches!(parse_header(&twice).unwrap_err(), FormatError::Name(name) if name == "a"));
    let dtype = with_header(r#"{"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#, 8);
    assert!(
        matches!(parse_header(&dtype).unwrap_err(), FormatError::UnknownDtype { got, .. } if got == "I64")
    );
    let huge = r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#;
    assert!(matches!(parse_header(&with_header(huge, 0)).unwrap_err(), FormatError::Overflow { .. }));
}

#[test]
fn a_header_length_past_the_limit_or_the_file_is_refused_before_it_is_read() {
    let mut file = vec![0_u8; 4096];
    file[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(parse_header(&file).unwrap_err(), FormatError::TooLong { got: u64::MAX, .. }));
    file[..8].copy_from_slice(&8184_u64.to_le_bytes());
    let error = parse_header(&file).unwrap_err();
    assert!(matches!(error, FormatError::HeaderTruncated { expected: 8192, got: 4096 }), "{error}");
    file[..8].copy_from_slice(&100_u64.to_le_bytes());
    assert!(matches!(parse_header(&file).unwrap_err(), FormatError::Unaligned { got: 108 }));
}

#[test]
fn a_manifest_of_a_later_format_is_refused_by_its_number() {
    let later = br#"{"format": 3, "later": "unknown"}"#;
    assert!(matches!(Manifest::parse(later).unwrap_err(), FormatError::Version(3)));
}

#[test]
fn the_tensor_width_of_a_row_is_its_bytes_in_elements() {
    assert_eq!(weight_type(Element::F32, 7), (Dtype::F32, 7));
    assert_eq!(weight_type(Element::F16, 7), (Dtype::F16, 8));
    assert_eq!(weight_type(Element::F16, 16), (Dtype::F16, 16));
    assert_eq!(weight_type(Element::Int8, 7), (Dtype::U8, 16));
    assert_eq!(weight_type(Element::Int8, 16), (Dtype::U8, 24));
}

#[test]
fn reserved_and_repeated_names_are_not_written() {
    let refused = |names: &[&str]| {
        let tensors: Vec<_> = names.iter().map(|name| (*name, Dtype::U8, &[1_u64][..])).collect();
        matches!(encode_header(&tensors).unwrap_err(), FormatError::Name(_))
    };
    assert!(refused(&[METADATA]) && refused(&["a", "a"]));
}
