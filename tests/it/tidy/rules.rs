//! The rules for source code, as data and as one check per rule. If you change a rule, also change
//! ARCHITECTURE.md or docs/contributing.md.

use super::source::Source;

/// A violation: the line, and what is wrong there.
pub type Broken = (usize, String);

/// A check of one file.
pub type Rule = fn(&Source) -> Vec<Broken>;

/// The rules for every file of `src/`.
pub const SRC_RULES: &[Rule] = &[
    imports,
    crate_homes,
    unsafe_homes,
    safety_comments,
    env_reads,
    proofs,
    module_docs,
    unfinished,
    names,
    short_files,
    short_lines,
];

/// The rules for `tests/` and `benches/`.
pub const OTHER_RULES: &[Rule] = &[safety_comments, module_docs, unfinished, names, short_lines];

/// Maximum lines of a file.
const FILE_LINES: usize = 600;

/// Maximum columns of a line.
const LINE_COLUMNS: usize = 110;

/// The import table: for each module, the paths outside the module that it may name outside tests. A
/// permission that no file uses is a violation too.
pub const IMPORTS: &[(&str, &[&str])] = &[
    // Only for tests.
    ("fuzz", &[]),
    ("types", &[]),
    ("pace", &["sync"]),
    ("mem", &["pace"]),
    ("sync", &[]),
    ("bounded_thread", &["sync"]),
    ("config", &["types"]),
    ("schema", &["types", "mem"]),
    ("metrics", &["types", "sync", "config", "schema"]),
    ("predict", &["types", "schema"]),
    ("compute", &["types", "mem", "schema"]),
    ("device", &["mem", "sync", "config", "compute"]),
    ("store", &["types", "mem", "pace", "config", "schema"]),
    ("learnlog", &["types", "sync", "schema", "metrics", "store"]),
    ("dataset", &["types", "mem", "pace", "schema", "learnlog"]),
    ("trace", &["types", "bounded_thread", "schema", "metrics"]),
    ("batcher", &["types", "sync", "config", "metrics", "predict"]),
    ("cache", &["types", "mem", "pace", "schema", "sync", "compute", "device"]),
    ("model", &["types", "mem", "pace", "schema", "predict", "compute"]),
    (
        "engine",
        &[
            "types", "mem", "sync", "pace", "schema", "metrics", "predict", "device", "cache", "store",
            "model", "trace",
        ],
    ),
    (
        "server",
        &[
            "types",
            "sync",
            "bounded_thread",
            "pace",
            "schema",
            "config",
            "metrics",
            "predict",
            "learnlog",
            "batcher",
        ],
    ),
    ("planner", &["types", "mem", "schema", "cache::policy"]),
    ("rowlog", &["types", "mem", "sync", "store"]),
    (
        "trainer",
        &[
            "types",
            "mem",
            "sync",
            "pace",
            "bounded_thread",
            "schema",
            "predict",
            "compute",
            "device",
            "dataset",
            "model",
            "store",
            "rowlog",
        ],
    ),
    ("cli", &[EVERYTHING]),
];

const EVERYTHING: &str = "*";

/// Crates that only some files may name, given by the beginning of their paths.
pub const CRATE_HOMES: &[(&str, &[&str])] = &[
    ("cudarc", &["device/cuda/"]),
    ("hyper", &["server/"]),
    ("hyper_util", &["server/"]),
    ("tonic", &["server/", "cli/"]),
    ("tonic_health", &["server/", "cli/"]),
    ("tonic_prost", &["server/", "cli/"]),
    ("tonic_reflection", &["server/", "cli/"]),
    ("prost", &["server/", "cli/"]),
    ("prost_types", &["server/", "cli/"]),
    ("rustls", &["server/", "cli/client/failure.rs"]),
    ("tokio_rustls", &["server/socket.rs"]),
    ("opentelemetry", &["server/spans.rs"]),
    ("opentelemetry_otlp", &["server/spans.rs"]),
    ("opentelemetry_sdk", &["server/spans.rs"]),
    ("ring", &["server/security/", "server/status_page"]),
    ("subtle", &["server/security/"]),
    ("x509_cert", &["server/security/"]),
    ("anyhow", &["main.rs", "cli/"]),
    ("loom", &["sync.rs"]),
    (
        "xxhash_rust",
        &["schema", "store/", "learnlog/", "rowlog/", "model/", "trace/", "device/cuda/", "server/traffic"],
    ),
];

/// Files that may contain `unsafe`, given by the beginning of their paths.
pub const UNSAFE_HOMES: &[&str] = &[
    "compute/",
    "device/",
    "cache/batch",
    "cache/gpu/",
    "cache/index",
    "cache/pool",
    "cache/epoch",
    "cli/cut_file",
    "fuzz/guided",
    "fuzz/memory",
    "store/bytes",
    "rowlog/mapping",
    "mem/arenas",
    "mem/pages",
    "mem/prefetch",
    "pace/priority",
    "trainer/pipeline/slots",
    "trainer/pipeline/gpu/",
];

/// The only file that may read the environment.
pub const ENV_HOME: &str = "config/mod.rs";

const EMPTY_NAMES: &[&str] = &["util", "utils", "helper", "helpers", "manager", "managers"];

pub fn imports(source: &Source) -> Vec<Broken> {
    let module = source.module();
    let Some(&own) = module.first() else { return Vec::new() };
    let Some((_, allowed)) = IMPORTS.iter().find(|(name, _)| *name == own) else {
        return vec![(1, format!("module {own} has no row in the import table"))];
    };
    let mut broken = Vec::new();
    for (target, line) in imported(source) {
        if !is_below(&target, own) && !allowed.iter().any(|prefix| is_below(&target, prefix)) {
            broken.push((line, format!("{own} may not import {}", target.join("::"))));
        }
    }
    broken
}

/// One message for each permission of the import table that no source uses.
pub fn unused_permissions(sources: &[Source]) -> Vec<String> {
    let mut unused = Vec::new();
    for (module, allowed) in IMPORTS {
        let own = sources.iter().filter(|source| source.module().first() == Some(module));
        let targets: Vec<_> = own.flat_map(imported).map(|(target, _)| target).collect();
        let is_unused = |prefix: &&&str| !targets.iter().any(|target| is_below(target, prefix));
        unused
            .extend(allowed.iter().filter(is_unused).map(|prefix| format!("{module} does not use {prefix}")));
    }
    unused
}

/// The paths below the crate's root that a source names, and their lines.
fn imported(source: &Source) -> Vec<(Vec<&str>, usize)> {
    let depth = source.module().len();
    let targets = source.paths.iter().map(|(path, line)| (path_from_root(path, depth), *line));
    targets.filter_map(|(target, line)| Some((target?, line))).collect()
}

fn is_below(target: &[&str], prefix: &str) -> bool {
    let prefix: Vec<&str> = prefix.split("::").collect();
    prefix == [EVERYTHING] || target.starts_with(&prefix)
}

/// The segments of a path below the crate's root, if it begins with `crate::` or with as many `super::` as
/// the file is deep. `None` for other paths.
fn path_from_root(path: &[String], depth: usize) -> Option<Vec<&str>> {
    let supers = path.iter().take_while(|segment| *segment == "super").count();
    let skip = if path.first().is_some_and(|first| first == "crate") {
        1
    } else if supers > 0 && supers >= depth {
        supers
    } else {
        return None;
    };
    Some(path[skip..].iter().map(String::as_str).collect())
}

pub fn crate_homes(source: &Source) -> Vec<Broken> {
    let mut broken = Vec::new();
    for (path, line) in &source.paths {
        let Some((name, homes)) = CRATE_HOMES.iter().find(|(name, _)| path[0] == *name) else { continue };
        if !homes.iter().any(|home| source.path.starts_with(home)) {
            broken.push((*line, format!("{name} belongs in {}", homes.join(", "))));
        }
    }
    broken
}

pub fn unsafe_homes(source: &Source) -> Vec<Broken> {
    if UNSAFE_HOMES.iter().any(|home| source.path.starts_with(home)) {
        return Vec::new();
    }
    let words = source.tokens.iter().filter(|t| t.text == "unsafe" || t.text == "unsafe_code");
    words.map(|t| (t.line, format!("{} belongs in {}", t.text, UNSAFE_HOMES.join(", ")))).collect()
}

pub fn safety_comments(source: &Source) -> Vec<Broken> {
    let blocks = source
        .tokens
        .windows(2)
        .filter(|pair| pair[0].text == "unsafe" && matches!(pair[1].text.as_str(), "{" | "impl"));
    blocks
        .map(|pair| pair[0].line)
        .filter(|&line| !source.has_comment_beside(line, |comment| comment.contains("SAFETY:")))
        .map(|line| (line, "unsafe without a SAFETY comment".to_owned()))
        .collect()
}

pub fn env_reads(source: &Source) -> Vec<Broken> {
    if source.path == ENV_HOME {
        return Vec::new();
    }
    let filter = |name: &str| {
        matches!(name, "from_env" | "from_env_lossy" | "try_from_env") || name.ends_with("from_default_env")
    };
    let reads_env = |path: &[String]| {
        path.windows(2).any(|pair| pair[0] == "env" && (pair[1].starts_with("var") || pair[1] == "*"))
            || path.last().is_some_and(|last| filter(last))
    };
    let found = source.paths.iter().filter(|(path, _)| reads_env(path));
    let found = found.map(|(path, line)| (*line, path.join("::")));
    let methods = source.code.windows(2).filter(|two| two[0].text == "." && filter(&two[1].text));
    let methods = methods.map(|two| (two[1].line, two[1].text.clone()));
    found.chain(methods).map(|(line, name)| (line, format!("{name} belongs in {ENV_HOME}"))).collect()
}

pub fn proofs(source: &Source) -> Vec<Broken> {
    let calls = source.code.windows(3).filter(|three| {
        three[0].text == "." && matches!(three[1].text.as_str(), "unwrap" | "expect") && three[2].text == "("
    });
    calls
        .filter(|call| !source.has_comment_beside(call[1].line, |_| true))
        .map(|call| (call[1].line, format!("{} without a comment that proves it", call[1].text)))
        .collect()
}

pub fn module_docs(source: &Source) -> Vec<Broken> {
    if source.path.ends_with("tests.rs") {
        return Vec::new();
    }
    let first = source.text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    if first.starts_with("//! ") { Vec::new() } else { vec![(1, "a file begins with //! docs".to_owned())] }
}

pub fn unfinished(source: &Source) -> Vec<Broken> {
    let marks = source.tokens.windows(2).filter(|pair| match pair[0].text.as_str() {
        "todo" | "unimplemented" => pair[1].text == "!",
        "[" => pair[1].text == "ignore",
        _ => false,
    });
    marks.map(|pair| (pair[0].line, format!("unfinished: {}{}", pair[0].text, pair[1].text))).collect()
}

pub fn names(source: &Source) -> Vec<Broken> {
    let is_definition = |word: &str| matches!(word, "mod" | "struct" | "enum" | "trait" | "fn" | "type");
    let defined = source.tokens.windows(2).filter(|pair| is_definition(&pair[0].text));
    let in_path = source.path.trim_end_matches(".rs").split('/').map(|part| (1, part));
    defined
        .map(|pair| (pair[1].line, pair[1].text.as_str()))
        .chain(in_path)
        .filter(|(_, name)| words(name).iter().any(|word| EMPTY_NAMES.contains(&word.as_str())))
        .map(|(line, name)| (line, format!("{name}: the name does not say what it is")))
        .collect()
}

pub fn short_files(source: &Source) -> Vec<Broken> {
    let lines = source.text.lines().count();
    let broken = (lines > FILE_LINES).then(|| (lines, format!("{lines} lines, limit {FILE_LINES}")));
    broken.into_iter().collect()
}

pub fn short_lines(source: &Source) -> Vec<Broken> {
    let columns = source.text.lines().map(|line| line.chars().count()).enumerate();
    let long = columns.filter(|(_, columns)| *columns > LINE_COLUMNS);
    long.map(|(i, columns)| (i + 1, format!("{columns} columns, limit {LINE_COLUMNS}"))).collect()
}

/// The words of a snake_case or CamelCase name, in lower case.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for c in name.chars() {
        if c == '_' || c.is_uppercase() {
            words.push(String::new());
        }
        if let (Some(word), true) = (words.last_mut(), c != '_') {
            word.extend(c.to_lowercase());
        }
    }
    words
}
