use super::super::sources::KERNELS;
use super::*;
use proptest::prelude::*;

fn entry() -> Entry<'static> {
    let target = Target::Binary(90);
    Entry {
        kernel: &KERNELS[0],
        target,
        options: &["--fmad=false"],
        nvrtc: NvrtcRelease { major: 13, minor: 0 },
        driver: 13_000,
    }
}

#[test]
fn an_image_is_found_only_by_the_key_that_it_was_stored_under() {
    let folder = tempfile::tempdir().unwrap();
    let cache = KernelCache::new(&folder.path().join("new/folder"));
    assert_eq!(cache.get(&entry()), Ok(None));
    cache.put(&entry(), b"image").unwrap();
    assert_eq!(cache.get(&entry()), Ok(Some(b"image".to_vec())));

    let other_text = KernelFile { text: "other", ..KERNELS[0] };
    let others = [
        Entry { kernel: &other_text, ..entry() },
        Entry { target: Target::Text(90), ..entry() },
        Entry { options: &["--fmad=true"], ..entry() },
        Entry { nvrtc: NvrtcRelease { major: 13, minor: 1 }, ..entry() },
        Entry { driver: 13_010, ..entry() },
    ];
    for other in others {
        assert_eq!(cache.get(&other), Ok(None), "{other:?}");
    }
    // No temporary file is left.
    assert_eq!(fs::read_dir(folder.path().join("new/folder")).unwrap().count(), 1);
}

#[cfg(unix)]
#[test]
fn only_the_owner_may_access_the_folder() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("kernels");
    KernelCache::new(&inner).put(&entry(), b"image").unwrap();
    assert_eq!(fs::metadata(inner).unwrap().permissions().mode() & 0o777, 0o700);
}

#[cfg(unix)]
#[test]
fn a_folder_to_which_others_may_write_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let cache = KernelCache::new(folder.path());
    cache.put(&entry(), b"image").unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o775)).unwrap();
    for trouble in [cache.get(&entry()).unwrap_err(), cache.put(&entry(), b"other").unwrap_err()] {
        assert!(trouble.contains("no other user may write") && trouble.contains("mode 775"), "{trouble}");
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_reported_with_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let trouble = KernelCache::new(&file.join("below")).put(&entry(), b"image").unwrap_err();
    assert!(trouble.contains("file/below") && trouble.contains("device.kernel_cache"), "{trouble}");
}

proptest! {
    #[test]
    fn any_change_of_a_file_is_detected(
        image in proptest::collection::vec(any::<u8>(), 0..64),
        at in any::<proptest::sample::Index>(),
        flip in 1_u8..,
        cut in any::<proptest::sample::Index>(),
    ) {
        let (key, file) = (entry().key(), file_of(&image, &entry().key()));
        prop_assert_eq!(image_of(&file, &key), Ok(image.as_slice()));
        let mut changed = file.clone();
        changed[at.index(file.len())] ^= flip;
        prop_assert!(image_of(&changed, &key).is_err());
        prop_assert!(image_of(&file[..cut.index(file.len())], &key).is_err());
        changed = file;
        changed.push(0);
        prop_assert!(image_of(&changed, &key).is_err());
    }
}

mod fuzz {
    use super::*;
    use crate::fuzz::bytes::{Input, mutated};
    use crate::fuzz::run;

    #[test]
    fn stored_kernels() {
        let (image, key) = (b"an image of a kernel", entry().key());
        run(mutated([file_of(image, &key)], &[]), |Input(file)| match image_of(&file, &key) {
            Ok(found) => {
                assert_eq!(found, image);
                true
            }
            Err(reason) => {
                assert!(reason.starts_with("expected") || reason.contains("does not match"), "{reason}");
                false
            }
        });
    }
}
