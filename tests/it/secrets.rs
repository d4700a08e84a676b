//! The program with certificates and tokens: wrong files, new files, its clients, and what it never prints.

use std::fs;
use std::thread;
use std::time::Duration;

use flechette::schema::preset::ArchKind;

use crate::certificates::{Authority, Files, Signed};
use crate::program::{Served, Workshop, flechette, run, run_failing, run_json};
use crate::serving::http_get_on;

const PREDICT: &str = "predict-token-0123456789";
const ADMIN: &str = "admin-token-0123456789";
const UNKNOWN: &str = "unknown-token-0123456789";

/// The line of the log after the files were read at a signal.
const READ_AGAIN: &str = "SIGHUP: no setting that can change while the server runs has changed";

/// A model, and all files of a server with TLS, certificates of clients, and tokens.
struct Secured {
    workshop: Workshop,
    files: Files,
    authority: Authority,
    own: Signed,
    flags: String,
}

impl Secured {
    fn new() -> Self {
        let (workshop, files, authority) = (Workshop::new(300, 50), Files::new(), Authority::new());
        workshop.train(ArchKind::Dlrm);
        let own = authority.sign(2090);
        files.certificate(&own);
        files.write("ca.pem", &authority.pem());
        files.write("predict", PREDICT);
        files.write("admin", ADMIN);
        files.write("unknown", UNKNOWN);
        let path = |name: &str| files.path(name).display().to_string();
        let config = format!(
            "[tls]\ncertificate = \"{}\"\nkey = \"{}\"\nclient_ca = \"{}\"\nhttp = \"off\"\n\
             [auth]\npredict = \"{}\"\nadmin = \"{}\"\nmetrics = \"{}\"\n\
             [server]\nadmin = \"on\"\n[log]\nlevel = \"trace,flechette=trace\"\n",
            path("server.pem"),
            path("server.key"),
            path("ca.pem"),
            path("predict"),
            path("admin"),
            path("admin"),
        );
        let flags = format!("--config {}", files.write("config.toml", &config).display());
        Self { workshop, files, authority, own, flags }
    }

    fn serve(&self) -> Served {
        Served::start(&self.workshop.models, &self.flags)
    }

    fn path(&self, name: &str) -> String {
        self.files.path(name).display().to_string()
    }

    /// A command line of `score` or `load` with a token from this file.
    fn client(&self, command: &str, served: &Served, token: &str) -> String {
        let (to_server, data) = (self.to_server(served, token), &self.workshop.valid);
        format!("{command} {to_server} --model dlrm --format criteo-tsv {data} --json")
    }

    /// The flags of a connection with a token from this file.
    fn to_server(&self, served: &Served, token: &str) -> String {
        let [ca, certificate, key, token] =
            ["ca.pem", "server.pem", "server.key", token].map(|n| self.path(n));
        let addr = served.grpc;
        format!(
            "--addr https://{addr} --ca {ca} --certificate {certificate} --key {key} --token-file {token}"
        )
    }
}

#[test]
fn the_clients_commands_use_tls_their_certificate_and_their_token() {
    let secured = Secured::new();
    let served = secured.serve();
    assert_eq!(run_json(&secured.client("score", &served, "predict"))["version"], 1);
    let load = secured.client("load", &served, "predict") + " --seconds 0.3 --concurrency 2 --batch 16";
    assert_eq!(run_json(&load)["errors"], serde_json::json!({}));
    for (token, words) in [
        ("admin", "PERMISSION_DENIED: authorization: expected a token of auth.predict"),
        ("unknown", "UNAUTHENTICATED: authorization: expected Bearer and a token of auth.predict"),
    ] {
        let error = run_failing(1, &secured.client("score", &served, token));
        assert!(error.contains(words), "{error}");
    }
    let without = |flag: &str, line: &str| {
        let (before, after) = line.split_once(flag).unwrap();
        before.to_owned() + after.trim_start().split_once(' ').unwrap().1
    };
    let line = secured.client("score", &served, "predict");
    let error = run_failing(1, &without("--token-file", &line));
    assert!(error.contains("UNAUTHENTICATED"), "{error}");
    let error = run_failing(1, &without("--ca", &line));
    assert!(error.contains("cannot connect") && error.contains("UnknownIssuer"), "{error}");
    let anonymous = without("--key", &without("--certificate", &line));
    assert!(run_failing(1, &anonymous).contains(&served.grpc.to_string()));
    for (line, words) in [
        (line.replace("https:", "http:"), "--ca: needs --addr https://HOST:PORT"),
        (line.replace("https:", "ftp:"), "expected http://HOST:PORT or https://HOST:PORT"),
        (line.replace("ca.pem", "nowhere"), "--ca: "),
        (line.replace("/predict", "/server.key"), "--token-file: "),
    ] {
        let error = run_failing(2, &line);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn labels_are_listed_with_a_token_of_predict_and_set_with_one_of_admin() {
    let secured = Secured::new();
    let served = secured.serve();
    let label = |token: &str, rest: &str| format!("label {} dlrm {rest}", secured.to_server(&served, token));
    let printed = |line: &str| String::from_utf8(run(line).stdout).unwrap();
    assert_eq!(printed(&label("predict", "")), "stable: 1 (latest)\nloaded: 1\n");
    assert_eq!(printed(&label("admin", "canary 1")), "canary: 1\n");
    for (token, rest, words) in [
        ("predict", "stable 1", "PERMISSION_DENIED: authorization: expected a token of auth.admin"),
        ("admin", "", "PERMISSION_DENIED: authorization: expected a token of auth.predict"),
        ("unknown", "stable 1", "UNAUTHENTICATED: authorization: expected Bearer"),
    ] {
        let error = run_failing(1, &label(token, rest));
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(printed(&label("admin", "canary none")), "canary: removed\n");
}

/// Everything that a run may print, and must not.
fn secrets(secured: &Secured) -> Vec<String> {
    let tokens = [PREDICT, ADMIN, UNKNOWN].map(|token| token.split_once('-').unwrap().1.to_owned());
    let key = secured.own.key.lines().filter(|line| !line.contains("-----")).map(str::to_owned);
    tokens.into_iter().chain([PREDICT, ADMIN, UNKNOWN].map(str::to_owned)).chain(key).collect()
}

#[test]
fn no_secret_is_printed_even_at_the_level_trace() {
    let secured = Secured::new();
    let served = secured.serve();
    let mut printed = String::new();
    let mut print = |line: &str| {
        let output = flechette()
            .env("FLECHETTE_LOG_LEVEL", "trace,flechette=trace")
            .args(line.split_whitespace())
            .output();
        let output = output.unwrap();
        printed += &String::from_utf8(output.stdout).unwrap();
        printed += &String::from_utf8(output.stderr).unwrap();
    };
    for token in ["predict", "admin", "unknown"] {
        print(&secured.client("score", &served, token));
    }
    print(&secured.client("score", &served, "server.key"));
    let authorization = format!("Authorization: Bearer {ADMIN}\r\n");
    let page = async {
        let stream = tokio::net::TcpStream::connect(served.http).await.unwrap();
        http_get_on(stream, "/metrics", &authorization).await
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    assert_eq!(runtime.block_on(page).0, 200);
    for action in ["print", "check"] {
        print(&format!("config {action} --models {} {}", secured.workshop.models, secured.flags));
    }
    // Files that are exchanged, and cut: their errors name them only.
    let key = fs::read_to_string(secured.files.path("server.key")).unwrap();
    let cases =
        [("server.pem", &*key), ("server.key", PREDICT), ("server.key", &key[..80]), ("predict", &key)];
    for (number, (name, text)) in cases.into_iter().enumerate() {
        let good = fs::read_to_string(secured.files.path(name)).unwrap();
        secured.files.write(name, text);
        served.signal("-HUP");
        print(&format!("serve --models {} {}", secured.workshop.models, secured.flags));
        served.said(READ_AGAIN, number + 1);
        secured.files.write(name, &good);
    }
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success());
    for words in ["TRACE", "DEBUG", "tls.certificate: ", "tls.key: ", "auth.predict: "] {
        assert!(log.contains(words), "{words}");
    }
    for words in ["predict = ", "tls.key", "--token-file: ", "UNAUTHENTICATED", "PERMISSION_DENIED"] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
    for secret in secrets(&secured) {
        for text in [&log, &printed] {
            let line = text.lines().find(|line| line.contains(&secret));
            assert_eq!(line, None, "{secret}");
        }
    }
}

#[test]
fn wrong_files_are_refused_at_start_with_their_settings() {
    let secured = Secured::new();
    let line = format!("serve --models {} {}", secured.workshop.models, secured.flags);
    let (own, other) = (&secured.own, Authority::new().sign(2090));
    let expired = secured.authority.sign(2020);
    for (name, text, words) in [
        ("server.pem", "text", "tls.certificate: @: expected a certificate in PEM form"),
        ("server.pem", &*own.key, "tls.certificate: @: expected a certificate in PEM form"),
        (
            "server.pem",
            &*expired.certificate,
            "tls.certificate: @: the certificate has expired at 2020-12-31",
        ),
        ("server.key", &*other.key, "tls.key: @: the key does not match tls.certificate"),
        ("server.key", &*own.certificate, "tls.key: @: expected a private key in PEM form"),
        ("ca.pem", "", "tls.client_ca: @: expected a certificate in PEM form"),
        ("predict", "short", "auth.predict: @: line 1: expected 16 to 512 visible characters, got 5 bytes"),
        ("admin", "\n# none\n", "auth.admin: @: expected a token on each line, got none"),
    ] {
        let path = secured.files.path(name);
        let good = fs::read_to_string(&path).unwrap();
        secured.files.write(name, text);
        let error = run_failing(2, &line);
        let words = words.replace('@', path.to_str().unwrap());
        assert!(error.contains(&words), "{words}: {error}");
        secured.files.write(name, &good);
    }
    fs::remove_file(secured.files.path("server.key")).unwrap();
    let error = run_failing(2, &line);
    assert!(error.contains("tls.key: ") && error.contains("No such file"), "{error}");
}

#[test]
fn settings_that_need_each_other_are_checked() {
    let (workshop, files) = (Workshop::new(300, 50), Files::new());
    let check = |text: &str| {
        let config = files.write("config.toml", text).display().to_string();
        run(&format!("config check --models {} --config {config}", workshop.models))
    };
    for (text, words) in [
        ("[tls]\nkey = \"k\"", "tls.certificate: missing, but needed by tls.key = k"),
        ("[tls]\ncertificate = \"c\"", "tls.key: missing, but needed by tls.certificate = c"),
        ("[tls]\nhttp = \"on\"", "tls.certificate: missing, but needed by tls.http = on"),
        (
            "[auth]\npredict = \"t\"\n[server]\nadmin = \"on\"",
            "auth.admin: missing, but needed by server.admin = on",
        ),
        (
            "[auth]\nmetrics = \"t\"\n[server]\nreflection = \"on\"",
            "auth.admin: missing, but needed by server.reflection = on",
        ),
    ] {
        let output = check(text);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains(words), "{words}: {error}");
    }
    for (text, words) in [
        ("[auth]\nadmin = \"t\"", "has no effect: server.admin and server.reflection are off"),
        (
            "[auth]\npredict = \"t\"\n[server]\ngrpc = \"0.0.0.0:1\"",
            "auth.predict: its tokens are not encrypted on the network: tls.certificate is not given",
        ),
        (
            "[auth]\nmetrics = \"t\"\n[server]\nhttp = \"0.0.0.0:1\"\n\
             [tls]\ncertificate = \"c\"\nkey = \"k\"",
            "auth.metrics: its tokens are not encrypted on the network: tls.http is off",
        ),
    ] {
        let output = check(text);
        let warning = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && warning.contains(words), "{words}: {warning}");
    }
}

#[test]
fn sighup_takes_new_files_or_says_at_once_why_not() {
    let secured = Secured::new();
    let served = secured.serve();
    let good = secured.authority.sign(2091);
    for (times, name, text) in [(1, "server.pem", &good.certificate), (2, "server.key", &good.key)] {
        secured.files.write(name, text);
        served.signal("-HUP");
        served.said(READ_AGAIN, times);
    }
    assert_eq!(run_json(&secured.client("score", &served, "predict"))["version"], 1);
    secured.files.write("server.pem", "");
    let path = |name: &str| secured.path(name);
    // Found without a signal, and said once.
    served.said(&format!("tls.certificate: {}: exp", path("server.pem")), 1);
    thread::sleep(Duration::from_secs(5));
    served.terminate();
    let (_, log) = served.ended();
    let lines = [
        format!(
            "ERROR flechette::server::security::files: tls.key: {}: the key does not match",
            path("server.key")
        ),
        "INFO flechette::server::security::files: new files are used from now on".to_owned(),
        format!("ERROR flechette::server::security::files: tls.certificate: {}: exp", path("server.pem")),
    ];
    let mut rest = &*log;
    for line in lines {
        assert_eq!(log.matches(&line).count(), 1, "{line}");
        rest = rest.split_once(&line).expect("in this order").1;
    }
}
