//! Runs the real program as a child process: other commands until they end, and `serve` until it is stopped.

use std::fmt::Debug;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use flechette::dataset::synthetic::write_criteo_tsv;
use flechette::schema::preset::{self, ArchKind};
use serde_json::Value;

use crate::skip::{skip, skip_part};
use crate::switching::wait;
use crate::trained;

/// A command for the program. It does not inherit settings from the environment of the tests.
pub fn flechette() -> Command {
    clean(Command::new(env!("CARGO_BIN_EXE_flechette")))
}

/// A command line for the program, in a shell that ran `setup`, such as `ulimit`.
pub fn flechette_in(setup: &str, line: &str) -> Command {
    let line = format!("{setup} && exec {} {line}", env!("CARGO_BIN_EXE_flechette"));
    let mut shell = clean(Command::new("sh"));
    shell.args(["-c", &line]);
    shell
}

/// The command, without settings from the environment.
fn clean(mut command: Command) -> Command {
    let ours = |name: &str| name.starts_with("FLECHETTE_") || name == "RUST_LOG";
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(ours) {
            command.env_remove(name);
        }
    }
    command
}

/// The longest time of a command, and of the start and the end of a server. It is far above what they take.
pub const LIMIT: Duration = Duration::from_secs(300);

/// A setup of [`Served::start_in`] with which no request that names no deadline is refused because it would
/// wait too long.
pub const PATIENT: &str = "export FLECHETTE_BATCHER_DEFAULT_DEADLINE_MS=3600000";

/// A flag with which the end of a server waits for the last version of its training. Training gets only the
/// time of the processors that nothing else takes.
pub const LAST_VERSION: &str = "--last-version-seconds 3600";

/// Runs a command line to its end.
pub fn run(line: &str) -> Output {
    let mut command = flechette();
    command.args(line.split_whitespace()).stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let id = child.id();
    let (ended, end) = mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        let late = end.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout);
        late && Command::new("kill").args(["-9", &id.to_string()]).status().is_ok()
    });
    let output = child.wait_with_output().unwrap();
    drop(ended);
    assert!(!watchdog.join().unwrap(), "{line}: no end after {LIMIT:?}: {output:?}");
    output
}

/// What a command has printed, and its peak memory in bytes.
pub struct Measured {
    pub stdout: String,
    pub peak: u64,
}

/// Runs a command that must succeed and prints less than a pipe holds.
pub fn run_measured(line: &str) -> Measured {
    let mut command = flechette();
    let command = command.args(line.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        peak = peak_bytes(child.id()).unwrap_or(0).max(peak);
        thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{line}");
    assert!(peak > 0, "{line}: ended before the first measurement");
    Measured { stdout: String::from_utf8(output.stdout).unwrap(), peak }
}

/// Runs a command that must succeed, and returns the line of JSON at the end of its output.
pub fn run_json(line: &str) -> Value {
    let output = run(line);
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    serde_json::from_str(text.lines().last().expect("a line of output")).unwrap()
}

/// Runs a command that must fail with this code and one line of error. No part of the line may be repeated.
/// Returns the line.
pub fn run_failing(code: i32, line: &str) -> String {
    let output = run(line);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{line}: {text}");
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(lines.len(), 1, "{line}: {text}");
    let parts: Vec<&str> = lines[0].split(": ").collect();
    assert!(parts.windows(2).all(|pair| pair[0] != pair[1]), "a part is repeated: {}", lines[0]);
    lines[0].to_owned()
}

/// The manifest of a version without its date, and so without its own checksum. It has the checksums of all
/// files.
pub fn manifest(models: &str, name: &str, version: u64) -> Value {
    let text = fs::read_to_string(format!("{models}/{name}/{version}/MANIFEST.json")).unwrap();
    let mut manifest: Value = serde_json::from_str(&text).unwrap();
    manifest["xxh3_128"].take();
    manifest["training"]["last_batch_unix_ms"].take();
    manifest
}

/// How often a test kills a process: as often as FLECHETTE_TEST_KILLS says, if it is set.
pub fn kills(otherwise: usize) -> usize {
    wanted("FLECHETTE_TEST_KILLS", otherwise)
}

/// How long a test runs: as many seconds as this variable says, if it is set.
pub fn seconds(variable: &str, otherwise: u64) -> Duration {
    Duration::from_secs(wanted(variable, otherwise))
}

/// The number that an environment variable has.
fn wanted<T: FromStr<Err: Debug>>(variable: &str, otherwise: T) -> T {
    std::env::var(variable).map_or(otherwise, |text| text.parse().unwrap())
}

/// A child process that is killed when dropped.
pub struct Background(pub Child);

impl Background {
    pub fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Checks that every version that is listed of a model can be served, and that training can continue from it.
/// Only a trainer that was killed early leaves no directory of the model.
pub fn check_listed_versions(models: &str, name: &str) {
    if !Path::new(models).join(name).is_dir() {
        return;
    }
    let listed = run_json(&format!("versions --models {models} --name {name} --json"));
    for version in listed["models"][0]["versions"].as_array().unwrap() {
        let good = version["good"] == true && version["training_refused"].is_null();
        assert!(good, "{name}: {version} of {listed}");
    }
}

/// The highest number of a model's versions, good or not; `None` if it has none.
pub fn highest_version(models: &Path, name: &str) -> Option<u64> {
    let entries = fs::read_dir(models.join(name)).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).max()
}

/// A directory with generated click logs for training and validation, and with trained models.
pub struct Workshop {
    pub dir: tempfile::TempDir,
    pub models: String,
    pub train: String,
    pub valid: String,
    pub train_rows: u64,
    pub valid_rows: u64,
}

impl Workshop {
    pub fn new(train_rows: u64, valid_rows: u64) -> Self {
        Self::at(tempfile::tempdir().unwrap(), train_rows, valid_rows)
    }

    /// A workshop in memory, if the system has such a file system. Versions are written and removed faster
    /// there.
    pub fn in_memory(train_rows: u64, valid_rows: u64) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Self::at(dir.unwrap(), train_rows, valid_rows)
    }

    fn at(dir: tempfile::TempDir, train_rows: u64, valid_rows: u64) -> Self {
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let (models, train, valid) = (path("models"), path("train.tsv"), path("valid.tsv"));
        write_criteo_tsv(train_rows, 1, fs::File::create(&train).unwrap()).unwrap();
        write_criteo_tsv(valid_rows, 2, fs::File::create(&valid).unwrap()).unwrap();
        Self { dir, models, train, valid, train_rows, valid_rows }
    }

    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    /// Writes the `model.toml` of an architecture over tables of `rows` rows.
    pub fn config(&self, kind: ArchKind, dim: usize, rows: u64) -> String {
        let path = self.path(&format!("{}.toml", kind.name()));
        fs::write(&path, preset::criteo(kind, dim, rows).to_toml()).unwrap();
        path
    }

    /// Trains a small model that is named after its architecture, and returns the output of `train --json`.
    /// The file [`Self::trained_scores`] then has the trainer's scores of the validation rows. The first
    /// version may be a copy of that of another workshop.
    pub fn train(&self, kind: ArchKind) -> Value {
        let (config, name) = (self.config(kind, 8, 1000), kind.name());
        let (out, Self { models, train, valid, .. }) = (self.trained_scores(kind), self);
        let anew = || {
            run_json(&format!(
                "train --model-config {config} --format criteo-tsv --data {train} --valid {valid} \
                 --valid-out {out} --models {models} --name {name} --json"
            ))
        };
        let is_first = !Path::new(models).join(name).exists();
        if is_first { trained::once(self, kind, anew) } else { anew() }
    }

    pub fn trained_scores(&self, kind: ArchKind) -> String {
        self.path(&format!("{}.scores", kind.name()))
    }
}

/// How much of the log of a server is shown when its test fails.
const LAST_LINES: usize = 100;

/// `serve` on free ports, killed when dropped. If the test fails, the end of its log is shown.
pub struct Served {
    child: Child,
    pub grpc: SocketAddr,
    pub http: SocketAddr,
    /// What it has logged, and the thread that reads that to its end.
    log: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Served {
    /// Starts a server and waits until it serves. Panics with its log if it ends instead.
    pub fn start(models: &str, flags: &str) -> Self {
        Self::start_until("true", (models, flags), ["grpc=", "http="])
    }

    /// Starts a server in a shell that ran `setup`, such as `ulimit`.
    pub fn start_in(setup: &str, models: &str, flags: &str) -> Self {
        Self::start_until(setup, (models, flags), ["grpc=", "http="])
    }

    /// Starts a server and waits until it listens. Models are loaded later.
    pub fn listening(models: &str, flags: &str) -> Self {
        Self::start_until("true", (models, flags), ["listening on ", "and on "])
    }

    /// Waits for the line of the log that has the addresses after these words.
    fn start_until(setup: &str, (models, flags): (&str, &str), [grpc, http]: [&'static str; 2]) -> Self {
        let ports = "--grpc 127.0.0.1:0 --http 127.0.0.1:0";
        let line = format!("serve --models {models} {ports} {flags}");
        let mut child = flechette_in(setup, &line).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (sender, addresses) = mpsc::channel();
        let log = Arc::<Mutex<String>>::default();
        let read = log.clone();
        let reader = thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                *read.lock().unwrap() += &format!("{line}\n");
                let address = |key| line.split_once(key)?.1.split(' ').next()?.parse::<SocketAddr>().ok();
                if let (Some(grpc), Some(http)) = (address(grpc), address(http)) {
                    let _ = sender.send((grpc, http));
                }
            }
        });
        match addresses.recv_timeout(LIMIT) {
            Ok((grpc, http)) => Self { child, grpc, http, log, reader: Some(reader) },
            Err(error) => {
                let _ = child.kill();
                reader.join().unwrap();
                panic!("serve does not listen: {error}: {}", log.lock().unwrap())
            }
        }
    }

    /// Waits until its log has these words this many times.
    pub fn said(&self, words: &str, times: usize) {
        wait(&format!("{times} times in the log: {words}"), || {
            self.log.lock().unwrap().matches(words).count() >= times
        });
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.grpc)
    }

    /// Scores a file with `score`, and returns the output of `--json`.
    pub fn score(&self, model: &str, file: &str, flags: &str) -> Value {
        let url = self.url();
        run_json(&format!("score --addr {url} --model {model} --format criteo-tsv {file} --json {flags}"))
    }

    /// The value of one line of the metrics page, or 0 if it is missing. Lines of this name must be there.
    pub fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let page = metrics_page(self.http);
        let wanted = |line: &&str| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{'))
                && labels.iter().all(|label| line.contains(label))
        };
        assert!(page.contains(&format!("\n{name}{{")), "no line of {name}: {page}");
        page.lines().find(wanted).map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    }

    /// The sum of all lines of the metrics page with this name and model.
    pub fn sum(&self, name: &str, model: &str) -> f64 {
        let label = format!("model=\"{model}\"");
        let lines = |line: &&str| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')) && line.contains(&label)
        };
        let value = |line: &str| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
        metrics_page(self.http).lines().filter(lines).map(value).sum()
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its peak memory.
    pub fn peak_bytes(&self) -> u64 {
        peak_bytes(self.child.id()).expect("serve is running")
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        self.signal("-TERM");
    }

    /// Sends a signal.
    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// Status code and text of a page of the HTTP port.
    pub fn get(&self, path: &str) -> (u16, String) {
        let page = http_page(self.http, path);
        let (head, body) = page.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    /// What the status page shows.
    pub fn status(&self) -> Value {
        serde_json::from_str(&self.get("/status.json").1).unwrap()
    }

    /// Waits until the server ends. Returns its exit status and its log.
    pub fn ended(mut self) -> (ExitStatus, String) {
        let begun = Instant::now();
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if begun.elapsed() < LIMIT => thread::sleep(Duration::from_millis(5)),
                None => {
                    self.child.kill().unwrap();
                    panic!("serve does not end: {}", self.whole_log());
                }
            }
        };
        (status, self.whole_log())
    }

    /// Its log, after its end.
    fn whole_log(&mut self) -> String {
        self.reader.take().unwrap().join().unwrap();
        std::mem::take(&mut self.log.lock().unwrap())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
            let lines: Vec<&str> = log.lines().collect();
            let last = lines.len().saturating_sub(LAST_LINES);
            eprintln!("the last lines of the log of serve:\n{}", lines[last..].join("\n"));
        }
    }
}

/// The metrics page of a server.
pub fn metrics_page(http: SocketAddr) -> String {
    http_page(http, "/metrics")
}

/// A page of the HTTP port, with its headers.
pub fn http_page(http: SocketAddr, path: &str) -> String {
    let mut stream = std::net::TcpStream::connect(http).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    std::io::Write::write_all(&mut stream, request.as_bytes()).unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    page
}

/// Peak memory (`VmHWM`) of a process, or `None` if it has ended.
pub fn peak_bytes(pid: u32) -> Option<u64> {
    bytes_of(pid, "VmHWM")
}

/// A memory value of a process, such as `VmRSS`, or `None` if it has ended.
pub fn bytes_of(pid: u32, name: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.split_whitespace().next()?.parse::<u64>().unwrap() * 1024)
}

/// A file of the real data sets in `$FLECHETTE_DATA` or `../shared/data`; they are not in the repository.
/// Reports the test as skipped and returns `None` if the file does not exist.
pub fn real(name: &str) -> Option<PathBuf> {
    find_real(name).inspect_err(|reason| skip(reason)).ok()
}

/// As [`real`], for a test that also runs without the file.
pub fn real_part(name: &str) -> Option<PathBuf> {
    find_real(name).inspect_err(|reason| skip_part(reason)).ok()
}

fn find_real(name: &str) -> Result<PathBuf, String> {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data");
    let folder = std::env::var_os("FLECHETTE_DATA").map_or_else(default, PathBuf::from);
    let path = folder.join(name);
    if path.is_file() { Ok(path) } else { Err(format!("no {} (set FLECHETTE_DATA)", path.display())) }
}
