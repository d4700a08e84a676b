//! Libraries that pretend to be NVIDIA's, and test programs that run with them.
//!
//! A process opens libcuda once, so a test that needs one runs itself again as a child, with the library
//! on its search path. [`Machine`] is what the child finds there; [`Machine::runs`] is written into the
//! test and does the one or the other.

use std::any::type_name_of_val;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

/// The pretended driver.
pub const LIBCUDA: &str = include_str!("pretend/libcuda.rs");
/// The pretended compiler.
pub const LIBNVRTC: &str = include_str!("pretend/libnvrtc.rs");

/// Set in a child, to the folder that is its own.
const INSIDE: &str = "PRETEND_FOLDER";

/// A machine with the libraries that are put there, and nothing else of NVIDIA's unless it is installed.
pub struct Machine {
    folder: TempDir,
    /// More folders to find libraries in.
    path: Vec<PathBuf>,
    settings: Vec<(String, String)>,
    /// There is no rustc to make the libraries, as on a machine that was brought the test program alone.
    unmade: bool,
}

/// What a child wrote.
pub struct Said {
    /// What it printed.
    pub out: String,
    /// What the pretended driver was asked, a line each.
    pub log: String,
}

impl Machine {
    /// A machine with no library.
    pub fn bare() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), path: Vec::new(), settings: Vec::new(), unmade: false }
    }

    /// A machine with the pretended driver and compiler.
    pub fn whole() -> Self {
        Self::bare().with("libcuda.so", LIBCUDA).with("libnvrtc.so", LIBNVRTC)
    }

    /// Puts a library there, compiled from this source.
    pub fn with(mut self, library: &str, source: &str) -> Self {
        match built(source) {
            Some(file) => drop(fs::copy(file, self.folder.path().join(library)).unwrap()),
            None => self.unmade = true,
        }
        self
    }

    /// Puts a file there.
    pub fn with_file(self, name: &str, contents: &str) -> Self {
        fs::write(self.folder.path().join(name), contents).unwrap();
        self
    }

    /// Puts a file there by the name that it has elsewhere.
    pub fn with_link(self, file: &Path) -> Self {
        let link = self.folder.path().join(file.file_name().unwrap());
        std::os::unix::fs::symlink(file, link).unwrap();
        self
    }

    /// Finds libraries in this folder too.
    pub fn with_path(mut self, folder: &Path) -> Self {
        self.path.push(folder.to_owned());
        self
    }

    /// Tells the pretended libraries something.
    pub fn told(mut self, name: &str, value: &str) -> Self {
        self.settings.push((format!("PRETEND_{name}"), value.to_owned()));
        self
    }

    /// In the test: runs this same test on the machine, as a child, and gives what it said; nothing, aloud,
    /// where there is no rustc. In the child: runs `inside`, with the folder that is the child's own, and
    /// gives nothing.
    pub fn runs(self, inside: impl FnOnce(&Path)) -> Option<Said> {
        if let Some(folder) = folder() {
            inside(&folder);
            return None;
        }
        // The closure's type is named by the test that it is written in.
        let name = type_name_of_val(&inside).trim_end_matches("::{{closure}}");
        let (_, test) = name.split_once("::").unwrap();
        self.runs_test(test)
    }

    /// Runs a test by its name on the machine.
    pub fn runs_test(&self, test: &str) -> Option<Said> {
        if !self.is_made() {
            return None;
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]).env(INSIDE, self.folder.path());
        let child = self.equips(&mut command).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
        assert!(child.status.success(), "{test} on a pretended machine:\n{out}{err}");
        assert!(out.contains("test result: ok. 1 passed"), "there is no test {test}:\n{out}{err}");
        Some(Said { out: out.into_owned(), log: fs::read_to_string(self.log()).unwrap_or_default() })
    }

    /// Whether the libraries could be made; says so where they could not.
    pub fn is_made(&self) -> bool {
        if self.unmade {
            eprintln!("skipped: no rustc to make the pretended libraries with");
        }
        !self.unmade
    }

    /// Makes a program run on the machine.
    pub fn equips<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        let folders = std::iter::once(self.folder.path()).chain(self.path.iter().map(PathBuf::as_path));
        command
            .env("LD_LIBRARY_PATH", std::env::join_paths(folders).unwrap())
            .env("PRETEND_LOG", self.log())
            .envs(self.settings.iter().map(|(name, value)| (name, value)))
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }
}

/// Whether this is a child.
pub fn is_child() -> bool {
    folder().is_some()
}

/// In a child, the folder that is its own.
fn folder() -> Option<PathBuf> {
    std::env::var_os(INSIDE).map(PathBuf::from)
}

/// What the pretended driver was asked so far, in a child.
pub fn log_so_far() -> String {
    fs::read_to_string(folder().unwrap().join("log")).unwrap_or_default()
}

/// A library of this source, compiled once and kept beside other things of the tests; none without rustc.
fn built(source: &str) -> Option<PathBuf> {
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{:016x}.so", xxh3_64(source.as_bytes())));
    if !kept.exists() {
        Command::new("rustc").arg("--version").output().ok()?;
        let aside = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (file, library) = (aside.path().join("library.rs"), aside.path().join("library.so"));
        fs::write(&file, source).unwrap();
        let made = Command::new("rustc")
            .args([
                "--crate-type",
                "cdylib",
                "--edition",
                "2021",
                "-C",
                "opt-level=1",
                "-D",
                "warnings",
                "-o",
            ])
            .args([&library, &file])
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        fs::rename(library, &kept).unwrap();
    }
    Some(kept)
}
