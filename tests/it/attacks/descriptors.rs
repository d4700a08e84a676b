//! With few file descriptors, or none, a server answers or waits without spinning. Its soft limit is raised
//! at the start.

use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use super::served::{models, serve};
use crate::fake::LIMIT;
use crate::serving::http_get;

/// The processor time that a process has used.
fn processor_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: u64 = [11, 12].map(|field| fields[field].parse::<u64>().unwrap()).iter().sum();
    Duration::from_millis(ticks * 10)
}

#[test]
fn with_few_descriptors_the_http_port_answers_beside_many_idle_connections() {
    let models = models();
    let served = serve("ulimit -n 64", models.path(), "");
    let idle: Vec<_> = (0..120).map(|_| std::net::TcpStream::connect(served.grpc).unwrap()).collect();
    let before = processor_time(served.id());
    std::thread::sleep(Duration::from_secs(1));
    assert!(processor_time(served.id()) - before < Duration::from_millis(300));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let health = async { tokio::time::timeout(LIMIT, http_get(served.http, "/healthz")).await };
    assert_eq!(runtime.block_on(health).expect("an answer in time").0, 200);
    drop(idle);
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success(), "{log}");
    for (words, lines) in
        [("limit of open files (ulimit -n) is too low", 1), ("further ones are closed at once", 1)]
    {
        assert_eq!(log.matches(words).count(), lines, "{log}");
    }
}

#[test]
fn the_soft_limit_of_descriptors_is_raised_to_the_hard_one() {
    let models = models();
    let served = serve("ulimit -Sn 40", models.path(), "");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", served.id())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let values: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(values[3], values[4], "{line}");
}

#[test]
fn without_descriptors_a_port_waits_and_serves_again_when_there_are_some() {
    let models = models();
    let served = serve("true", models.path(), "");
    let pid = Pid::from_raw(served.id() as i32).unwrap();
    let few = |current| Rlimit { current: Some(current), maximum: Some(20_000) };
    let old = prlimit(Some(pid), Resource::Nofile, few(4)).unwrap();
    let waiting = std::net::TcpStream::connect(served.grpc).unwrap();
    let before = processor_time(served.id());
    std::thread::sleep(Duration::from_secs(1));
    let used = processor_time(served.id()) - before;
    prlimit(Some(pid), Resource::Nofile, old).unwrap();
    assert!(used < Duration::from_millis(300), "{used:?}");
    std::thread::sleep(Duration::from_millis(500));
    drop(waiting);
    assert_eq!(served.metric("flechette_serving_version", &["model=\"ads\""]), 1.0);
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success(), "{log}");
    assert_eq!(log.matches("connections cannot be accepted").count(), 1, "{log}");
}
