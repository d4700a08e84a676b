mod fuzz;

use super::*;

const NAMES: [&str; 2] = ["a", "b"];

/// Two files whose contents must be equal.
fn pair(folder: &Path) -> Watched<String> {
    let files = NAMES.map(|name| SettingFile { setting: name, path: folder.join(name) });
    let parse = |files: &[Contents]| {
        let equal = files[0].bytes == files[1].bytes;
        let text = String::from_utf8_lossy(&files[0].bytes).into_owned();
        if equal { Ok(text) } else { Err(files[1].wrong("not equal to a")) }
    };
    Watched::open(files.into(), parse).unwrap()
}

fn write(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(name), text).unwrap();
}

fn logged<T>(watched: &Watched<T>) -> Option<(String, bool)> {
    let seen = watched.seen.lock().unwrap();
    seen.refused.as_ref().map(|refused| (refused.reason.to_string(), refused.logged))
}

#[test]
fn files_that_belong_together_are_taken_over_when_both_have_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    NAMES.iter().for_each(|name| write(path, name, "old"));
    let pair = pair(path);
    assert!(pair.check(Asker::Timer).is_none() && pair.check(Asker::Operator).is_none());
    write(path, "a", "new");
    assert!(pair.check(Asker::Timer).is_none());
    assert_eq!((pair.value().as_str(), logged(&pair).unwrap().1), ("old", false));
    write(path, "b", "new");
    assert_eq!(pair.check(Asker::Timer).unwrap().as_str(), "new");
    assert_eq!((pair.value().as_str(), logged(&pair)), ("new", None));
}

#[test]
fn a_bad_file_is_logged_once_and_the_old_value_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    NAMES.iter().for_each(|name| write(path, name, "old"));
    let pair = pair(path);
    write(path, "b", "bad");
    let reason = format!("b: {}: not equal to a", path.join("b").display());
    for expected in [false, true, true] {
        assert!(pair.check(Asker::Timer).is_none());
        assert_eq!(logged(&pair), Some((reason.clone(), expected)));
    }
    // Who has changed the file would not know that the change has no effect.
    write(path, "b", "bad too");
    for expected in [false, true] {
        assert!(pair.check(Asker::Timer).is_none());
        assert_eq!(logged(&pair), Some((reason.clone(), expected)));
    }
    fs::remove_file(path.join("b")).unwrap();
    assert!(pair.check(Asker::Operator).is_none());
    let (reason, logged_at_once) = logged(&pair).unwrap();
    assert!(reason.contains("No such file") && logged_at_once, "{reason}");
    assert_eq!(pair.value().as_str(), "old");
    write(path, "b", "old");
    assert!(pair.check(Asker::Timer).is_none() && logged(&pair).is_none());
}

#[test]
fn only_files_of_a_limited_size_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    fs::write(&path, vec![0; (1 << 20) + 1]).unwrap();
    for (path, expected) in [
        (path, "limit 1048576 bytes, got more"),
        ("/dev/zero".into(), "not a file"),
        (folder.path().into(), "not a file"),
    ] {
        let error = Contents::read("a", &path).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
