use std::io::Write;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

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
    open(file.path(), &Stop::default()).unwrap().read_to_end(&mut text)?;
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

/// RFC 8878, section 3.1.1.2: the contents of a block have at most 128 KiB, or the frame's window.
#[test]
fn a_zstd_block_whose_contents_are_larger_than_a_block_may_be_is_refused() {
    let sequences = 32_700_u16;
    let mut block = vec![0, 0xff];
    block.extend((sequences - 0x7f00).to_le_bytes());
    // Of one kind each: no literals, the last offset, a match of 65,539 bytes or more.
    block.extend([0x54, 0, 0, 52]);
    block.extend(vec![0xff; 65_400]);
    block.push(1);
    let header = |kind: u32, bytes: usize| (kind | (bytes as u32) << 3).to_le_bytes()[..3].to_vec();
    // A window of 1 KiB, 8 bytes as they are, and the last block, which is compressed.
    let frame =
        [b"\x28\xb5\x2f\xfd\0\0", &header(0, 8)[..], b"abcdefgh", &header(5, block.len()), &block].concat();
    assert!(frame.len() < 66_000);
    assert_eq!(read(&frame).unwrap_err().to_string(), "the zstd data is truncated or damaged");
}

#[test]
fn a_zstd_frame_whose_window_is_above_the_limit_is_refused() {
    let frame = |header: &[u8]| [b"\x28\xb5\x2f\xfd", header, &[0; 8]].concat();
    let refused = |header: &[u8]| read(&frame(header)).unwrap_err().to_string();
    // 2^28 bytes; then 2^27 and an eighth of it; then a single segment of 2^33 bytes.
    for (header, window) in [
        (&[0x00, 18 << 3][..], 1_u64 << 28),
        (&[0x00, 17 << 3 | 1], (1 << 27) + (1 << 24)),
        (&[0xe0, 0, 0, 0, 0, 2, 0, 0, 0], 1 << 33),
    ] {
        let expected = format!("a zstd frame has a window of {window} bytes, limit 134217728");
        assert_eq!(refused(header), expected);
    }
    assert_eq!(refused(&[0x00, 17 << 3]), "the zstd data is truncated or damaged", "the limit itself");
}

/// A pipe that has these bytes, and its path for this process.
#[cfg(target_os = "linux")]
fn pipe_with(bytes: &[u8]) -> (io::PipeReader, io::PipeWriter, PathBuf) {
    use std::os::fd::AsRawFd as _;
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(bytes).unwrap();
    let path = format!("/proc/self/fd/{}", reader.as_raw_fd()).into();
    (reader, writer, path)
}

#[cfg(target_os = "linux")]
#[test]
fn an_interrupt_ends_the_wait_for_the_rest_of_a_pipe() {
    let [gzip, zstd] = [gzip, zstd].map(|compress| compress(&text()[..5000]));
    for begin in [&b""[..], b"a", b"abcdef", &gzip[..2], &gzip[..900], &zstd[..2], &zstd[..900]] {
        let (_reader, _writer, path) = pipe_with(begin);
        let stop = Stop::default();
        let interrupt = thread::spawn({
            let stop = stop.clone();
            move || {
                thread::sleep(Duration::from_millis(100));
                stop.interrupt();
            }
        });
        let error = match open(&path, &stop) {
            Ok(mut source) => source.read_to_end(&mut Vec::new()).unwrap_err(),
            Err(DatasetError::Open { cause, .. }) => cause,
            Err(error) => panic!("{error}"),
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{begin:?}: {error}");
        interrupt.join().unwrap();
    }
}

/// Otherwise a file of one endless line, of which no sample comes, is read to its end.
#[test]
fn an_interrupt_ends_the_reading_of_a_file_and_a_pause_does_not() {
    for whole in [text(), gzip(&text()), zstd(&text())] {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), whole).unwrap();
        let stop = Stop::default();
        let mut source = open(file.path(), &stop).unwrap();
        stop.pause();
        source.read_exact(&mut [0; 10]).unwrap();
        stop.interrupt();
        let error = source.read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_pause_in_the_first_bytes_of_a_pipe_loses_none_of_them() {
    let text = &text()[..5000];
    for whole in [text.to_vec(), gzip(text), zstd(text)] {
        let (first, rest) = whole.split_at(1);
        let (_reader, mut writer, path) = pipe_with(first);
        let stop = Stop::default();
        let opened = thread::spawn({
            let stop = stop.clone();
            move || open(&path, &stop).unwrap()
        });
        thread::sleep(Duration::from_millis(100));
        stop.pause();
        writer.write_all(rest).unwrap();
        drop(writer);
        let mut source = opened.join().unwrap();
        stop.resume();
        let mut read = Vec::new();
        source.read_to_end(&mut read).unwrap();
        assert_eq!(read, text);
    }
}
