//! Pretended NVIDIA libraries, and child processes that use them.
//!
//! A process loads libcuda only once. So a test that needs a stub runs itself again as a child
//! process, with the library on its search path. [`Machine`] describes the libraries. The test calls
//! [`Machine::runs`], which starts the child; in the child, the same call runs the test's code.

// White-box tests share this file, and each of the two programs uses a part.
#![allow(dead_code)]

use std::any::type_name_of_val;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

use crate::skip::skip;

/// The source of the stub driver.
pub(crate) const LIBCUDA: &str = include_str!("stub_driver/libcuda.rs");
/// The source of the stub compiler.
pub(crate) const LIBNVRTC: &str = include_str!("stub_driver/libnvrtc.rs");

/// Environment variable of a child: the path of its folder.
const INSIDE: &str = "PRETEND_FOLDER";

/// The libraries and settings of a child. A child may also find NVIDIA libraries that are installed on this
/// machine.
pub(crate) struct Machine {
    folder: TempDir,
    /// More folders with libraries.
    path: Vec<PathBuf>,
    settings: Vec<(String, String)>,
    /// There is no rustc to compile the libraries, for example because only the test program was copied here.
    without_rustc: bool,
}

/// The output of a child.
pub(crate) struct ChildOutput {
    /// Standard output.
    pub out: String,
    /// The stub driver's log of calls, one per line.
    pub log: String,
}

impl Machine {
    /// A machine without libraries.
    pub(crate) fn bare() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            path: Vec::new(),
            settings: Vec::new(),
            without_rustc: false,
        }
    }

    /// A machine with the stub driver and compiler.
    pub(crate) fn whole() -> Self {
        Self::bare().with("libcuda.so", LIBCUDA).with("libnvrtc.so", LIBNVRTC)
    }

    /// Adds a library that is compiled from this source.
    pub(crate) fn with(mut self, library: &str, source: &str) -> Self {
        match built(source) {
            Some(file) => drop(fs::copy(file, self.folder.path().join(library)).unwrap()),
            None => self.without_rustc = true,
        }
        self
    }

    /// Adds a file.
    pub(crate) fn with_file(self, name: &str, contents: &str) -> Self {
        fs::write(self.folder.path().join(name), contents).unwrap();
        self
    }

    /// Adds a symbolic link to a file, with the file's name.
    pub(crate) fn with_link(self, file: &Path) -> Self {
        let link = self.folder.path().join(file.file_name().unwrap());
        std::os::unix::fs::symlink(file, link).unwrap();
        self
    }

    /// Adds a folder to the library path.
    pub(crate) fn with_path(mut self, folder: &Path) -> Self {
        self.path.push(folder.to_owned());
        self
    }

    /// Sets a variable for the stub libraries.
    pub(crate) fn with_setting(self, name: &str, value: &str) -> Self {
        self.with_variable(&format!("PRETEND_{name}"), value)
    }

    /// Sets an environment variable of the child.
    pub(crate) fn with_variable(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// In the test: runs the test again as a child with these libraries and returns the child's output, or
    /// skips the test and returns `None` if there is no rustc. In the child: runs `inside` with the child's
    /// folder and returns `None`.
    pub(crate) fn runs(self, inside: impl FnOnce(&Path)) -> Option<ChildOutput> {
        if let Some(folder) = folder() {
            inside(&folder);
            return None;
        }
        // The name of the closure's type contains the name of its test.
        let name = type_name_of_val(&inside).trim_end_matches("::{{closure}}");
        let (_, test) = name.split_once("::").unwrap();
        self.runs_test(test)
    }

    /// Runs the test with this name in a child with these libraries.
    pub(crate) fn runs_test(&self, test: &str) -> Option<ChildOutput> {
        if !self.is_available() {
            return None;
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]).env(INSIDE, self.folder.path());
        let child = self.equip(&mut command).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
        assert!(child.status.success(), "{test} on a machine with a stub driver:\n{out}{err}");
        assert!(out.contains("test result: ok. 1 passed"), "the child did not run {test}:\n{out}{err}");
        Some(ChildOutput { out: out.into_owned(), log: fs::read_to_string(self.log()).unwrap_or_default() })
    }

    /// Whether the libraries could be compiled. If not, reports the test as skipped.
    pub(crate) fn is_available(&self) -> bool {
        if self.without_rustc {
            skip("no rustc to compile the stub libraries");
        }
        self.is_complete()
    }

    /// Whether the libraries could be compiled.
    pub(crate) fn is_complete(&self) -> bool {
        !self.without_rustc
    }

    /// Sets the environment of a command, so that the program uses these libraries.
    pub(crate) fn equip<'c>(&self, command: &'c mut Command) -> &'c mut Command {
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

/// Whether this process is a child.
pub(crate) fn is_child() -> bool {
    folder().is_some()
}

/// The child's folder; `None` in a process that is not a child.
fn folder() -> Option<PathBuf> {
    std::env::var_os(INSIDE).map(PathBuf::from)
}

/// The stub driver's log so far. Must be called in a child.
pub(crate) fn log_so_far() -> String {
    fs::read_to_string(folder().unwrap().join("log")).unwrap_or_default()
}

/// Compiles a library from this source, or returns the cached one from the tests' temporary folder. `None` if
/// there is no rustc.
fn built(source: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().unwrap();
    let folder = program.parent().unwrap().join("stub_driver");
    let kept = folder.join(format!("{:016x}.so", xxh3_64(source.as_bytes())));
    if !kept.exists() {
        Command::new("rustc").arg("--version").output().ok()?;
        fs::create_dir_all(&folder).unwrap();
        let temporary = tempfile::tempdir_in(&folder).unwrap();
        let (file, library) = (temporary.path().join("library.rs"), temporary.path().join("library.so"));
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
