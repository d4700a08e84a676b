mod fuzz;

use super::*;
use proptest::prelude::*;

fn header() -> Header {
    let table = |(name, rows): (&str, u64)| HeaderTable { name: name.into(), rows };
    Header { rate: 0.25, tables: [("a", 100), ("b", u64::MAX), ("c \"\u{e4}\"", 1)].map(table).to_vec() }
}

type Accesses = Vec<(u32, u64)>;

fn blocks() -> impl Strategy<Value = Vec<Accesses>> {
    let access =
        prop_oneof![(Just(0u32), 0u64..100), (Just(1u32), 0u64..u64::MAX), (Just(2u32), Just(0u64)),];
    prop::collection::vec(prop::collection::vec(access, 1..20), 0..5)
}

fn bytes(blocks: &[Accesses]) -> Vec<u8> {
    let mut file = header().bytes();
    for block in blocks {
        let mut payload = Vec::new();
        block.iter().for_each(|&(table, row)| push_access(&mut payload, TableId(table), row));
        file.extend(block_head(&payload, block.len() as u32));
        file.extend(payload);
    }
    file
}

fn read(file: &[u8]) -> Result<(Header, Accesses, FileEnd), TraceFormatError> {
    let reader = match TraceReader::open(file)? {
        OpenedTrace::Whole(reader) => reader,
        OpenedTrace::Truncated { bytes } => {
            assert_eq!(bytes, file.len() as u64);
            return Ok((header(), Vec::new(), FileEnd::Truncated { read: 0, rest: bytes }));
        }
    };
    let (header, mut accesses) = (reader.header().clone(), Vec::new());
    let ended = reader.read(|table, row| {
        accesses.push((table.0, row));
        Ok::<(), TraceFormatError>(())
    })?;
    Ok((header, accesses, ended))
}

proptest! {
    #[test]
    fn a_written_recording_is_read_back(blocks in blocks()) {
        let got = read(&bytes(&blocks)).unwrap();
        prop_assert_eq!(got, (header(), blocks.concat(), FileEnd::Whole));
    }

    #[test]
    fn a_cut_file_is_read_up_to_its_last_whole_block(blocks in blocks(), at in any::<prop::sample::Index>()) {
        let file = bytes(&blocks);
        let begin = header().bytes().len();
        let at = at.index(file.len());
        let got = read(&file[..at]);
        if at < begin {
            let ended = FileEnd::Truncated { read: 0, rest: at as u64 };
            prop_assert_eq!(got.unwrap(), (header(), vec![], ended));
            return Ok(());
        }
        let whole = (0..=blocks.len()).rev().find(|&n| bytes(&blocks[..n]).len() <= at).unwrap();
        let read = bytes(&blocks[..whole]).len();
        let ended = if at == read {
            FileEnd::Whole
        } else {
            FileEnd::Truncated { read: read as u64, rest: (at - read) as u64 }
        };
        prop_assert_eq!(got.unwrap(), (header(), blocks[..whole].concat(), ended));
    }

    #[test]
    fn a_changed_byte_is_an_error_or_cuts_the_file_and_never_adds_an_access(
        blocks in blocks(), at in any::<prop::sample::Index>(), mask in 1u8..,
    ) {
        let mut file = bytes(&blocks);
        let at = at.index(file.len());
        file[at] ^= mask;
        match read(&file) {
            Err(error) => prop_assert!(error.to_string().starts_with("at byte ")),
            Ok((got, accesses, ended)) => {
                prop_assert_eq!(got, header());
                let is_cut = matches!(ended, FileEnd::Truncated { .. });
                prop_assert!(is_cut);
                prop_assert!(blocks.concat().starts_with(&accesses));
            }
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(tail in prop::collection::vec(any::<u8>(), 0..200), honest: bool) {
        let file = if honest { [header().bytes(), tail].concat() } else { tail };
        let _ = read(&file);
    }

    #[test]
    fn any_payload_with_a_good_checksum_is_read_or_refused(
        payload in prop::collection::vec(any::<u8>(), 1..60), accesses in 0u32..40,
    ) {
        let file = [header().bytes(), block_head(&payload, accesses).to_vec(), payload].concat();
        if let Ok((_, got, ended)) = read(&file) {
            prop_assert_eq!((got.len() as u32, ended), (accesses, FileEnd::Whole));
        }
    }
}

#[test]
fn errors_name_the_offset_and_the_fault() {
    let refused = |file: &[u8]| read(file).unwrap_err().to_string();
    let text = refused(b"label\t1\t2\t3 and so on");
    assert!(text.contains("at byte 0: expected an access trace, got \"label"), "{text}");
    let past = |table, row| {
        let mut payload = Vec::new();
        push_access(&mut payload, TableId(table), row);
        refused(&[header().bytes(), block_head(&payload, 1).to_vec(), payload].concat())
    };
    assert!(past(0, 100).contains("table \"a\": expected a row below 100, got 100"));
    assert!(past(3, 0).contains("expected a table below 3, got 3"));
    let text = refused(&Header { rate: 2.0, tables: vec![] }.bytes());
    assert!(text.contains("rate: expected a number above 0, at most 1, got 2"), "{text}");
    let huge = [MAGIC.as_slice(), &u32::MAX.to_le_bytes()].concat();
    assert!(refused(&huge).contains("at most 16777216 bytes"));
}
