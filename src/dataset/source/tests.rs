use std::io::Write;

use flate2::write::GzEncoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use super::*;

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn zstd(text: &[u8]) -> Vec<u8> {
    compress_to_vec(text, CompressionLevel::Fastest)
}

fn read(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let mut text = Vec::new();
    open(file.path(), &Arc::default(), &Stop::default()).unwrap().read_to_end(&mut text)?;
    Ok(text)
}

fn text() -> Vec<u8> {
    (0..60_000u32).flat_map(|i| format!("{}\t", i.wrapping_mul(2_654_435_761) % 5000).into_bytes()).collect()
}

#[test]
fn plain_gzip_and_zstd_are_recognised_by_content() {
    for text in [text(), b"a".to_vec(), vec![]] {
        assert_eq!(read(&text).unwrap(), text);
        assert_eq!(read(&gzip(&text)).unwrap(), text);
        assert_eq!(read(&zstd(&text)).unwrap(), text);
    }
}

#[test]
fn several_members_or_frames_are_one_stream() {
    let text = text();
    let (head, tail) = text.split_at(text.len() / 3);
    assert_eq!(read(&[gzip(head), gzip(tail)].concat()).unwrap(), text);
    let skippable = [&[0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
    let frames = [skippable.clone(), zstd(head), skippable, zstd(tail)].concat();
    assert_eq!(read(&frames).unwrap(), text);
}

#[test]
fn a_truncated_file_is_an_error_at_any_cut() {
    let text = &text()[..5000];
    for whole in [gzip(text), zstd(text)] {
        for cut in (5..whole.len()).step_by(7).chain([whole.len() - 1]) {
            assert!(read(&whole[..cut]).is_err(), "cut at {cut} of {}", whole.len());
        }
    }
}

#[test]
fn a_changed_byte_is_an_error_or_changes_nothing() {
    let text = &text()[..5000];
    for whole in [gzip(text), zstd(text)] {
        for at in (10..whole.len()).step_by(11) {
            let mut changed = whole.clone();
            changed[at] ^= 0x55;
            if let Ok(read) = read(&changed) {
                assert_eq!(read, text, "changed at {at}");
            }
        }
    }
}

#[test]
fn a_damaged_zstd_file_is_reported_in_plain_words() {
    let text = text();
    let mut whole = zstd(&text);
    whole.truncate(whole.len() / 2);
    for bytes in [whole, b"\x28\xb5\x2f\xfd and no frame behind the magic".to_vec()] {
        let message = read(&bytes).unwrap_err().to_string();
        assert_eq!(message, "the zstd data is truncated or damaged");
    }
}
