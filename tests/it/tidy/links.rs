//! Checks that every link of a page to a file of the repository names a file that exists, and that its anchor
//! is a heading there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The lines of a page outside blocks of code.
fn prose(page: &str) -> Vec<&str> {
    let mut is_code = false;
    let is_prose = |line: &&str| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    };
    page.lines().filter(is_prose).collect()
}

/// The targets of the links of a page, without those to other sites.
fn targets(page: &str) -> Vec<String> {
    let text = prose(page).join("\n");
    let targets = text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned()));
    targets.filter(|target| !target.contains("://")).collect()
}

/// The anchor that GitHub gives a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase().replace(' ', "-");
    kept.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect()
}

/// The anchors of a page: those of its headings, and those that it names itself.
fn anchors(page: &str) -> BTreeSet<String> {
    let anchor_of = |line: &str| {
        let heading = line.trim_start_matches('#');
        if heading.len() < line.len() && heading.starts_with(' ') {
            return Some(anchor(heading));
        }
        Some(line.split_once("<a id=\"")?.1.split_once('"')?.0.to_owned())
    };
    prose(page).into_iter().filter_map(anchor_of).collect()
}

/// What is wrong with a link of the page at `path`, if anything is.
fn broken(path: &Path, target: &str) -> Option<String> {
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let linked = if file.is_empty() { path.to_owned() } else { path.parent()?.join(file) };
    if !linked.exists() {
        return Some(format!("{}: {target}: no such file", path.display()));
    }
    let is_there =
        anchor.is_empty() || anchors(&fs::read_to_string(&linked).unwrap_or_default()).contains(anchor);
    (!is_there).then(|| format!("{}: {target}: no such heading", path.display()))
}

#[test]
fn every_link_of_the_documentation_leads_to_a_file_and_a_heading() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "clients/python/README.md"];
    let mut pages: Vec<PathBuf> = pages.iter().map(|page| root.join(page)).collect();
    let docs = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    pages.extend(docs.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    let (mut lines, mut links) = (Vec::new(), 0);
    for path in &pages {
        let targets = targets(&fs::read_to_string(path).unwrap());
        links += targets.len();
        lines.extend(targets.iter().filter_map(|target| broken(path, target)));
    }
    assert!(links > 100, "{links} links in {} pages", pages.len());
    assert!(lines.is_empty(), "{} links lead nowhere:\n{}", lines.len(), lines.join("\n"));
}

#[test]
fn a_link_to_a_file_or_a_heading_that_does_not_exist_is_caught() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("page.md"), dir.path().join("other.md"));
    let page = "# A page\n[a](#what-cachebytes-covers), [b\nc](other.md#named-here), [d](other.md),\n\
                [e](https://example.com/#x) and [`f`](other.md#a-page), [g](#code), [h](nowhere.md)\n\
                ## What `cache.bytes` covers\n```sh\n# Code\n[i](nowhere.md)\n```\n";
    fs::write(&path, page).unwrap();
    fs::write(other, "<a id=\"named-here\"></a>\n").unwrap();
    let found = targets(page);
    assert_eq!(found.len(), 6, "{found:?}");
    let wrong: Vec<_> = found.into_iter().filter(|target| broken(&path, target).is_some()).collect();
    assert_eq!(wrong, ["other.md#a-page", "#code", "nowhere.md"]);
    assert_eq!(anchor(" Memory, disk and `wide_deep`"), "memory-disk-and-wide_deep");
}
