//! `train --metrics-http`: the metrics of a run without a server.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;

use flechette::schema::preset::ArchKind;

use crate::certificates::Files;
use crate::program::{Background, LIMIT, Workshop, flechette, run_failing};
use crate::switching::wait;

const TOKEN: &str = "metrics-0123456789abcdef";

/// Starts a command, and returns it with the address of its metrics.
fn start(line: &str) -> (Background, SocketAddr) {
    let mut command = flechette();
    command.args(line.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let (sender, address) = mpsc::channel();
    thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            let found = line.split_once("metrics address=").and_then(|(_, address)| address.parse().ok());
            if let Some(found) = found {
                let _ = sender.send(found);
            }
        }
    });
    (Background(child), address.recv_timeout(LIMIT).unwrap())
}

/// Status and text of a page.
fn get(address: SocketAddr, path: &str, token: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let lines = format!("Host: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n");
    stream.write_all(format!("GET {path} HTTP/1.1\r\n{lines}\r\n").as_bytes()).unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    page
}

#[test]
fn the_metrics_of_a_run_are_shown_to_those_with_a_token() {
    let (workshop, files) = (Workshop::new(600, 10), Files::new());
    let config = workshop.config(ArchKind::Dlrm, 4, 100);
    let (models, incoming) = (&workshop.models, workshop.path("incoming"));
    fs::create_dir(&incoming).unwrap();
    let token = files.write("token", TOKEN);
    let settings = files.write("flechette.toml", &format!("[auth]\nmetrics = \"{}\"\n", token.display()));
    let line = format!(
        "train --config {} --model-config {config} --format criteo-tsv --follow {incoming} --models {models} \
         --name m --batch 20 --publish-every 2steps --metrics-http",
        settings.display()
    );
    let (running, address) = start(&format!("{line} 127.0.0.1:0"));
    let metric = |name: &str| -> f64 {
        let page = get(address, "/metrics", TOKEN);
        let start = format!("flechette_{name}{{model=\"m\"}} ");
        page.lines().find_map(|line| line.strip_prefix(&start)).map_or(0.0, |value| value.parse().unwrap())
    };
    assert_eq!(metric("training_state"), 1.0);
    fs::rename(&workshop.train, format!("{incoming}/1")).unwrap();
    wait("versions are published", || metric("publishes_total") > 1.0);
    wait("all samples are trained", || metric("training_samples_total") == 600.0);
    wait("they are measured", || metric("progressive_log_loss") > 0.0);
    assert!(metric("publish_pause_seconds_count") > 1.0 && metric("publish_rows_total") > 0.0);
    assert!(get(address, "/metrics", "other").starts_with("HTTP/1.1 401 "));
    assert!(get(address, "/", TOKEN).starts_with("HTTP/1.1 404 "));
    // The port is taken. Nothing is trained then.
    let taken = run_failing(2, &format!("{} {address}", line.replace("--name m", "--name n")));
    assert!(taken.contains("--metrics-http: cannot listen on"), "{taken}");
    assert!(!fs::exists(format!("{models}/n/1")).unwrap());
    drop(running);
}
