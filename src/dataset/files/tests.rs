use std::fs;

use super::*;

fn follow(dir: &Path, until: Option<&str>) -> Files {
    Files::Followed(Follow::new(dir, until.map(str::to_owned)))
}

/// The names that are returned until the reader would wait.
fn names(files: &mut Files) -> Vec<String> {
    let stop = Stop::default();
    let mut names = Vec::new();
    loop {
        // Without a next file the call must return at once.
        let Files::Followed(follow) = &*files else { unreachable!() };
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
fn following_continues_with_the_named_file_even_if_it_is_gone_and_a_file_given_back_is_next() {
    let dir = tempfile::tempdir().unwrap();
    ["a", "b", "c"].into_iter().for_each(|name| fs::write(dir.path().join(name), "").unwrap());
    let mut files = Files::Followed(Follow::new(dir.path(), None).from("b").unwrap());
    assert_eq!(names(&mut files), ["b", "c"]);
    files.give_back(dir.path().join("c"));
    assert_eq!(files.next(&Stop::default()).unwrap(), Next::File(dir.path().join("c")));
}
