//! Every alert of `deploy/prometheus/` fires for a live server that fails in that way, and for no other one.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use flechette::schema::preset::ArchKind;
use flechette::server::proto::ctr_client::CtrClient;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::certificates::{Authority, Files};
use crate::learn::served::labelled;
use crate::program::{Background, Served, Workshop, flechette};
use crate::prometheus::{Prometheus, RULES, faster, is_installed, promtool, replaced};
use crate::serving::channel;
use crate::skip::skip_part;
use crate::stub_driver::Machine;
use crate::switching::{requests, wait};

const MODEL: &str = "dlrm";

/// The alert that no server causes, but that there is none.
const ABSENT: &str = "FlechetteAbsent";

/// The alert that needs a stub GPU.
const DEVICE_LOST: &str = "FlechetteDeviceLost";

/// The unit tests of the rules.
const RULE_TESTS: &str = include_str!("../../deploy/prometheus/flechette.test.yml");

/// How long the servers are well while Prometheus watches.
const CALM: Duration = Duration::from_secs(8);

/// How long the alerts may take after that. They wait up to ten minutes, which are ten seconds here.
const LIMIT: Duration = Duration::from_secs(300);

/// The age at which data is stale in this test, instead of a day.
const STALE: &str = "> 4";

/// A server, the alerts that its failure causes, and the failure.
struct Case {
    served: Served,
    expected: &'static [&'static str],
    /// Makes it fail while Prometheus watches, if it does not fail from the beginning. Returns what must live
    /// on.
    fail: Box<dyn FnOnce(&Served) -> Kept>,
    kept: Vec<Kept>,
}

/// What must live as long as a server.
type Kept = Box<dyn Any>;

impl Case {
    fn new(served: Served, expected: &'static [&'static str]) -> Self {
        Self { served, expected, fail: Box::new(|_| Box::new(())), kept: Vec::new() }
    }

    fn keep(mut self, kept: impl Any) -> Self {
        self.kept.push(Box::new(kept));
        self
    }

    fn then<T: Any>(self, fail: impl FnOnce(&Served) -> T + 'static) -> Self {
        Self { fail: Box::new(|served| Box::new(fail(served))), ..self }
    }
}

/// Sends requests with the samples of a file until it is dropped.
fn load(served: &Served, file: &str, flags: &str) -> Background {
    let url = served.url();
    let line = format!("load --addr {url} --model {MODEL} --format criteo-tsv {file} --seconds 300 {flags}");
    Background::start(flechette().args(line.split_whitespace()))
}

/// A copy of the workshop's models, in another folder of it.
fn copied(workshop: &Workshop, name: &str) -> String {
    let copy = workshop.path(name);
    assert!(Command::new("cp").args(["-r", &workshop.models, &copy]).status().unwrap().success());
    copy
}

/// The flag for a file of settings.
fn config(workshop: &Workshop, name: &str, text: &str) -> String {
    let path = workshop.path(name);
    fs::write(&path, text).unwrap();
    format!("--config {path}")
}

/// It is scored with, and nothing fails. But no newer data is trained.
fn well(workshop: &Workshop) -> Case {
    let served = Served::start(&workshop.models, "");
    let load = load(&served, &workshop.valid, "--batch 1 --rate 5");
    Case::new(served, &["FlechetteModelStale"]).keep(load)
}

fn killed(workshop: &Workshop) -> Case {
    Case::new(Served::start(&workshop.models, ""), &["FlechetteDown"]).then(|served| served.signal("-KILL"))
}

fn without_models(workshop: &Workshop) -> Case {
    let empty = workshop.path("empty");
    fs::create_dir(&empty).unwrap();
    Case::new(Served::start(&empty, ""), &["FlechetteNotReady"])
}

/// One of its models has no good version, and clients call that one.
fn with_a_damaged_model(workshop: &Workshop) -> Case {
    let models = copied(workshop, "damaged");
    fs::create_dir_all(Path::new(&models).join("other/1")).unwrap();
    let served = Served::start(&models, "");
    let (program, url, file) = (env!("CARGO_BIN_EXE_flechette"), served.url(), &workshop.valid);
    let call = format!("{program} score --addr {url} --model other --format criteo-tsv {file}");
    let calls = format!("for n in $(seq 1000); do {call}; sleep 0.2; done");
    let calls = Background::start(Command::new("sh").args(["-c", &calls]));
    Case::new(served, &["FlechetteModelNotServed", "FlechetteFailing"]).keep(calls)
}

/// One thread computes for 256 clients.
fn overloaded(workshop: &Workshop) -> Case {
    let served = Served::start(&workshop.models, "--threads 1");
    let load = load(&served, &workshop.valid, "--concurrency 256");
    Case::new(served, &["FlechetteSlow"]).keep(load)
}

/// Its clients do not wait until a batch of 400 samples is computed.
fn with_impatient_clients(workshop: &Workshop) -> Case {
    let served = Served::start(&workshop.models, "--threads 1");
    let load = load(&served, &workshop.valid, "--batch 400 --concurrency 8 --timeout 0.001");
    Case::new(served, &["FlechetteGivenUp"]).keep(load)
}

/// It takes one call at a time.
fn narrow(workshop: &Workshop) -> Case {
    let config = config(workshop, "narrow.toml", "[server]\nmax_requests = 1\n");
    let served = Served::start(&workshop.models, &config);
    let load = load(&served, &workshop.valid, "--batch 1 --concurrency 4");
    Case::new(served, &["FlechetteShedding"]).keep(load)
}

/// Its clients do not have the token that it has now.
fn with_a_new_token(workshop: &Workshop) -> Case {
    let token = workshop.path("token");
    fs::write(&token, "predict-0123456789abcdef\n").unwrap();
    let text = format!("[auth]\npredict = \"{token}\"\n");
    let served = Served::start(&workshop.models, &config(workshop, "auth.toml", &text));
    let (program, url, file) = (env!("CARGO_BIN_EXE_flechette"), served.url(), &workshop.valid);
    let call = format!("{program} score --addr {url} --model {MODEL} --format criteo-tsv {file}");
    let calls = format!("for n in $(seq 1000); do {call}; sleep 0.2; done");
    Case::new(served, &["FlechetteClientsRefused"])
        .then(move |_| Background::start(Command::new("sh").args(["-c", &calls])))
}

/// First clients send the same ten samples, which are cached, and then samples of random ids.
fn with_other_ids(workshop: &Workshop) -> Case {
    let (same, random) = (workshop.path("same.tsv"), workshop.path("random.tsv"));
    let lines = fs::read_to_string(&workshop.valid).unwrap();
    fs::write(&same, lines.split_inclusive('\n').take(10).collect::<String>()).unwrap();
    let mut text = String::new();
    for sample in 0..2000_u64 {
        text += &format!("0{}", "\t1".repeat(13));
        (0..26).for_each(|n| write!(text, "\t{:08x}", xxh3_64_with_seed(&[n], sample) as u32).unwrap());
        text.push('\n');
    }
    fs::write(&random, text).unwrap();
    let served = Served::start(&workshop.models, "--cache-mode on --cache-fraction 0.02");
    let calm = load(&served, &same, "--batch 10 --rate 5");
    Case::new(served, &["FlechetteHitRateCollapsed"]).then(move |served| {
        drop(calm);
        load(served, &random, "--batch 20 --rate 5")
    })
}

fn with_a_damaged_version(workshop: &Workshop) -> Case {
    let models = copied(workshop, "refusing");
    Case::new(Served::start(&models, ""), &["FlechetteVersionRefused"])
        .then(move |_| fs::create_dir(Path::new(&models).join(MODEL).join("2")).unwrap())
}

/// It trains on files that arrive. Its versions are too bad to be published, and its last file is no data.
fn training(workshop: &Workshop) -> Case {
    let (models, incoming) = (copied(workshop, "trained"), workshop.path("incoming"));
    fs::create_dir(&incoming).unwrap();
    let flags = format!(
        "--train {MODEL}={incoming} --format criteo-tsv --batch 32 --max-malformed 0 --publish-every 2steps \
         --publish-gate auc=0.9999"
    );
    let served = Served::start(&models, &flags);
    let data = workshop.train.clone();
    Case::new(served, &["FlechettePublishFailed", "FlechetteTrainingFailed"]).then(move |_| {
        fs::rename(data, format!("{incoming}/1")).unwrap();
        fs::write(format!("{incoming}/2"), "not a sample\n").unwrap();
    })
}

/// It trains, but its versions cannot be written: files larger than 4 KiB fail, as on a full disk.
fn that_cannot_write(workshop: &Workshop) -> Case {
    let (models, incoming) = (copied(workshop, "unwritable"), workshop.path("arriving"));
    fs::create_dir(&incoming).unwrap();
    let flags = format!("--train {MODEL}={incoming} --format criteo-tsv --batch 32 --publish-every 2steps");
    // Without the signal, a write beyond the limit is an error.
    let served = Served::start_in("trap '' XFSZ && ulimit -f 8", &models, &flags);
    let data = workshop.valid.clone();
    Case::new(served, &["FlechettePublishFailed"]).then(move |_| {
        fs::copy(data, format!("{incoming}/.1")).unwrap();
        fs::rename(format!("{incoming}/.1"), format!("{incoming}/1")).unwrap();
    })
}

/// Its log of learned samples has room for some hundred calls.
fn with_a_full_log(workshop: &Workshop) -> Case {
    let config = config(workshop, "learn.toml", "[learn]\nenabled = \"on\"\nmax_bytes = \"1MiB\"\n");
    let models = copied(workshop, "learning");
    let served = Served::start(&models, &config);
    let (address, sample) = (served.grpc, requests(workshop).remove(0).0);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.spawn(async move {
        let mut client = CtrClient::new(channel(address).await);
        loop {
            // The first ones are stored.
            if client.learn(labelled(sample.clone(), 1.0)).await.is_err() {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    });
    Case::new(served, &["FlechetteLearnRefused"]).keep(runtime)
}

/// Idle clients take all connections of its gRPC port, but few descriptors.
fn with_few_connections(workshop: &Workshop) -> Case {
    let text = "[server]\nhandshake_seconds = 300\nmax_connections = 20\n";
    let served = Served::start(&workshop.models, &config(workshop, "connections.toml", text));
    let idle: Vec<_> = (0..20).map(|_| TcpStream::connect(served.grpc).unwrap()).collect();
    Case::new(served, &["FlechetteConnectionsHigh"]).keep(idle)
}

/// Idle clients take all descriptors that connections may take.
fn with_few_descriptors(workshop: &Workshop) -> Case {
    let config = config(workshop, "patient.toml", "[server]\nhandshake_seconds = 300\n");
    let served = Served::start_in("ulimit -n 64", &workshop.models, &config);
    let idle: Vec<_> = (0..64).map(|_| TcpStream::connect(served.grpc).unwrap()).collect();
    Case::new(served, &["FlechetteConnectionsHigh", "FlechetteFilesLow"]).keep(idle)
}

/// Its stub GPU computes wrong scores. `None`, and this part of the test is skipped, if that cannot be
/// compiled. `cusim_serve.rs` has a GPU that fails later.
fn with_a_bad_device(workshop: &Workshop) -> Option<Case> {
    let machine = Machine::whole();
    if !machine.is_complete() {
        skip_part("no rustc to compile the stub libraries");
        return None;
    }
    let mut command = Command::new("sh");
    let mut setup = "true".to_owned();
    for (name, value) in machine.equip(&mut command).get_envs() {
        write!(setup, " && export {}='{}'", name.to_str()?, value?.to_str()?).unwrap();
    }
    let served = Served::start_in(&setup, &workshop.models, "--device auto --cache-mode on");
    Some(Case::new(served, &[DEVICE_LOST]).keep(machine))
}

/// Its certificate expires tomorrow.
fn with_an_old_certificate(workshop: &Workshop) -> Case {
    let files = Files::new();
    let tls = files.certificate(&Authority::new().sign_for(Duration::from_secs(86_400)));
    let (certificate, key) = (tls.certificate.display(), tls.key.display());
    let text = format!("[tls]\ncertificate = \"{certificate}\"\nkey = \"{key}\"\n");
    let served = Served::start(&workshop.models, &config(workshop, "tls.toml", &text));
    let expected = &["FlechetteCertificateExpires", "FlechetteCertificateExpiresSoon"];
    Case::new(served, expected).keep(files)
}

/// The names of all alerts.
fn alerts() -> impl Iterator<Item = &'static str> {
    RULES.lines().filter_map(|line| line.trim_start().strip_prefix("- alert: "))
}

#[test]
fn every_alert_has_a_unit_test_in_which_it_fires() {
    let cases = RULE_TESTS.split("- alertname: ").skip(1).filter(|case| case.contains("- exp_labels: "));
    let fires: BTreeSet<&str> = cases.filter_map(|case| case.lines().next()).collect();
    assert_eq!(alerts().collect::<BTreeSet<_>>(), fires);
}

#[test]
fn every_alert_fires_for_a_server_that_fails_in_that_way_and_for_no_other() {
    if !is_installed() {
        return;
    }
    let workshop = Workshop::new(1000, 400);
    workshop.train(ArchKind::Dlrm);
    let mut cases: Vec<Case> = [
        well,
        killed,
        without_models,
        with_a_damaged_model,
        overloaded,
        with_impatient_clients,
        narrow,
        with_a_new_token,
        with_other_ids,
        with_a_damaged_version,
        training,
        that_cannot_write,
        with_a_full_log,
        with_few_connections,
        with_few_descriptors,
        with_an_old_certificate,
    ]
    .map(|case| case(&workshop))
    .into();
    let bad_device = with_a_bad_device(&workshop);
    let no_case = if bad_device.is_some() { &[ABSENT][..] } else { &[ABSENT, DEVICE_LOST] };
    cases.extend(bad_device);
    let servers: Vec<_> = cases.iter().map(|case| case.served.http).collect();
    let prometheus = Prometheus::start(&servers, &faster(&replaced(RULES, "> 86400", STALE)));
    sleep(CALM);
    wait("the hit rate before its collapse is recorded", || {
        let recorded = "count_over_time(model:flechette_cache_hits:ratio_5m[1m]) > 8";
        prometheus.query(recorded).is_ok_and(|series| !series.is_empty())
    });
    for case in &mut cases {
        let fail = std::mem::replace(&mut case.fail, Box::new(|_| Box::new(())));
        case.kept.push(fail(&case.served));
    }

    let of_case = |case: &Case| {
        let instance = case.served.http.to_string();
        case.expected.iter().map(move |alert| (instance.clone(), *alert)).collect::<Vec<_>>()
    };
    let mut missing: BTreeSet<(String, &str)> = cases.iter().flat_map(of_case).collect();
    let expected = missing.clone();
    let (began, mut others) = (Instant::now(), BTreeSet::new());
    while !missing.is_empty() {
        assert!(began.elapsed() < LIMIT, "did not fire: {missing:#?}");
        sleep(Duration::from_millis(500));
        for alert in prometheus.query("ALERTS{alertstate=\"firing\"}").unwrap() {
            let label = |name| alert.label(name).unwrap().to_owned();
            let fired = (label("instance"), label("alertname"));
            missing.retain(|(instance, name)| (instance, *name) != (&fired.0, fired.1.as_str()));
            others.insert(fired);
        }
        // The clients of a server whose alerts have fired are no longer needed.
        for case in &mut cases {
            let instance = case.served.http.to_string();
            if !missing.iter().any(|(other, _)| *other == instance) {
                case.kept.clear();
            }
        }
    }
    let known: BTreeSet<&str> = expected.iter().map(|(_, alert)| *alert).collect();
    assert_eq!(known, alerts().filter(|alert| !no_case.contains(alert)).collect());
    // On a slow machine, others may be slow too, refuse calls, and not answer Prometheus in time. Most have a
    // model that is not trained any more. But `well`, the first one, has too few calls to refuse any.
    let others_too = ["FlechetteSlow", "FlechetteShedding", "FlechetteDown", "FlechetteModelStale"];
    let well = cases[0].served.http.to_string();
    others.retain(|(instance, name)| {
        let refuses = *instance == well && name == "FlechetteShedding";
        let is_expected = expected.contains(&(instance.clone(), name.as_str()));
        (refuses || !others_too.contains(&name.as_str())) && !is_expected
    });
    assert!(others.is_empty(), "fired for other servers: {others:#?}");
}

#[test]
fn an_alert_fires_for_a_prometheus_that_finds_no_server() {
    if !is_installed() {
        return;
    }
    let prometheus = Prometheus::start(&[], &faster(RULES));
    let firing = format!("ALERTS{{alertname=\"{ABSENT}\", alertstate=\"firing\"}}");
    wait("the alert fires", || prometheus.query(&firing).is_ok_and(|alerts| alerts.len() == 1));
}

#[test]
fn the_rules_pass_promtool() {
    if is_installed() {
        promtool(&["check", "rules", "flechette.rules.yml"], "");
        for config in ["prometheus.yml", "compose.yml"] {
            promtool(&["check", "config", config], "");
        }
        promtool(&["test", "rules", "flechette.test.yml"], "");
    }
}
