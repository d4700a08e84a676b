use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use super::*;

fn follow(dir: &Path, until: Option<&str>) -> Files {
    Files::Followed(FollowedDir::new(dir, until.map(str::to_owned)))
}

/// The names that are returned until the reader would wait.
fn names(files: &mut Files) -> Vec<String> {
    let stop = Stop::default();
    let mut names = Vec::new();
    loop {
        // Without a next file the call must return at once.
        let Files::Followed(follow) = &mut *files else { unreachable!() };
        let last = follow.names().unwrap().into_iter().next_back();
        if last.is_none() || last == follow.current {
            stop.pause();
        }
        match files.next(&stop).unwrap() {
            Next::File(path) => names.push(path.file_name().unwrap().to_str().unwrap().to_owned()),
            Next::Stopped | Next::End => return names,
        }
    }
}

#[test]
fn files_are_followed_in_the_order_of_their_names_and_incomplete_ones_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let add = |name: &str| fs::write(dir.path().join(name), "").unwrap();
    let mut files = follow(dir.path(), None);
    assert!(names(&mut files).is_empty());
    ["b", "a", ".c", "d.tmp", "e.part"].into_iter().for_each(add);
    fs::create_dir(dir.path().join("f")).unwrap();
    assert_eq!(names(&mut files), ["a", "b"]);
    fs::rename(dir.path().join("d.tmp"), dir.path().join("d")).unwrap();
    add("aa");
    assert_eq!(names(&mut files), ["d"], "aa is late");
    fs::remove_file(dir.path().join("a")).unwrap();
    add("g");
    assert_eq!(names(&mut files), ["g"]);
}

#[test]
fn following_ends_after_the_last_name_or_before_a_greater_one() {
    let dir = tempfile::tempdir().unwrap();
    ["a", "b", "d"].into_iter().for_each(|name| fs::write(dir.path().join(name), "").unwrap());
    let ended = |until: &str| {
        let mut files = follow(dir.path(), Some(until));
        let mut count = 0;
        while matches!(files.next(&Stop::default()).unwrap(), Next::File(_)) {
            count += 1;
        }
        assert_eq!(files.next(&Stop::default()).unwrap(), Next::End);
        count
    };
    assert_eq!([ended("b"), ended("c"), ended("d"), ended("0")], [2, 2, 3, 0]);
}

#[test]
fn following_continues_after_the_named_file() {
    let dir = tempfile::tempdir().unwrap();
    ["a", "b", "c"].into_iter().for_each(|name| fs::write(dir.path().join(name), "").unwrap());
    let mut follow = FollowedDir::new(dir.path(), None);
    assert!(!follow.clone().continue_after("aa").unwrap());
    assert!(follow.continue_after("b").unwrap());
    let mut files = Files::Followed(follow);
    assert_eq!(names(&mut files), ["c"]);
}

#[test]
fn only_files_and_links_to_files_are_followed() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let of = |name: &str| dir.path().join(name);
    let add = |name: &str| fs::write(of(name), "").unwrap();
    fs::write(elsewhere.path().join("target"), "").unwrap();
    symlink(elsewhere.path().join("target"), of("a-link")).unwrap();
    symlink(elsewhere.path().join("nothing"), of("b-dangling")).unwrap();
    symlink(elsewhere.path(), of("c-link-to-a-directory")).unwrap();
    fs::create_dir(of("d-directory")).unwrap();
    assert!(Command::new("mkfifo").arg(of("e-pipe")).status().unwrap().success());
    add("g");
    let mut files = follow(dir.path(), None);
    assert_eq!(names(&mut files), ["a-link", "g"]);
    let Files::Followed(follow) = &files else { unreachable!() };
    assert_eq!(follow.refused.len(), 4, "{:?}", follow.refused);
    // It becomes a file before its turn.
    symlink(elsewhere.path().join("later"), of("h-dangling")).unwrap();
    assert!(names(&mut files).is_empty());
    fs::write(elsewhere.path().join("later"), "").unwrap();
    assert_eq!(names(&mut files), ["h-dangling"]);
}

#[test]
fn a_followed_directory_that_is_away_for_a_while_is_waited_for() {
    let parent = tempfile::tempdir().unwrap();
    let [dir, away] = ["dir", "away"].map(|name| parent.path().join(name));
    assert!(follow(&dir, None).next(&Stop::default()).is_err(), "it was never there");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("a"), "").unwrap();
    let mut files = follow(&dir, None);
    let stop = Stop::default();
    assert_eq!(files.next(&stop).unwrap(), Next::File(dir.join("a")));
    fs::rename(&dir, &away).unwrap();
    let back = std::thread::spawn({
        let (stop, dir) = (stop.clone(), dir.clone());
        move || {
            sleep(3 * POLL);
            stop.interrupt();
            sleep(3 * POLL);
            fs::write(away.join("b"), "").unwrap();
            fs::rename(&away, &dir).unwrap();
        }
    });
    assert_eq!(files.next(&stop).unwrap(), Next::Stopped, "a signal ends the wait");
    assert_eq!(files.next(&Stop::default()).unwrap(), Next::File(dir.join("b")));
    back.join().unwrap();
}

#[test]
fn files_are_not_late_because_the_directory_was_empty_for_a_while() {
    let dir = tempfile::tempdir().unwrap();
    ["a", "b"].into_iter().for_each(|name| fs::write(dir.path().join(name), "").unwrap());
    let mut follow = FollowedDir::new(dir.path(), None);
    assert!(follow.continue_after("b").unwrap());
    let known = follow.known.clone();
    follow.report_late(&BTreeSet::new());
    assert_eq!(follow.known, known);
}

/// Other systems refuse such names.
#[cfg(target_os = "linux")]
#[test]
fn a_name_that_is_not_utf_8_is_reported_once_and_not_followed() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().unwrap();
    let name = OsStr::from_bytes(b"a-\xff");
    fs::write(dir.path().join(name), "").unwrap();
    fs::write(dir.path().join("b"), "").unwrap();
    let mut files = follow(dir.path(), None);
    assert_eq!(names(&mut files), ["b"]);
    let Files::Followed(follow) = &files else { unreachable!() };
    assert_eq!(follow.refused, [name.to_owned()].into());
}
