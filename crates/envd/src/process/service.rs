//! The RPCs of `process.Process`, mapped to the modules around this one.

use std::sync::Arc;

use connectrpc::{
    ConnectError, Encodable, InboundStream, RequestContext, Response, ServiceRequest,
    ServiceResult, ServiceStream,
};
use futures::StreamExt;
use rustix::process::Signal as SystemSignal;
use tokio::time::Instant;

use super::input::Input;
use super::launch::{self, Request};
use super::output;
use super::stream::Stream;
use super::table::{Found, Process, Selector};
use crate::http::auth::username;
use crate::proto::process::{self as rpc, *};
use crate::state::Agent;

/// The service.
pub struct Processes(pub Arc<Agent>);

impl Processes {
    fn find(&self, selector: Option<&ProcessSelector>) -> Result<Arc<Process>, ConnectError> {
        let selector = wanted(selector)?;
        self.0
            .processes
            .find_running(&selector)
            .ok_or_else(|| not_found(&selector))
    }
}

fn wanted(selector: Option<&ProcessSelector>) -> Result<Selector, ConnectError> {
    match selector.and_then(|selector| selector.selector.as_ref()) {
        Some(process_selector::Selector::Pid(pid)) => Ok(Selector::Pid(*pid)),
        Some(process_selector::Selector::Tag(tag)) => Ok(Selector::Tag(tag.clone())),
        None => Err(ConnectError::invalid_argument(
            "a process is selected by its pid or its tag",
        )),
    }
}

fn not_found(selector: &Selector) -> ConnectError {
    ConnectError::not_found(format!("{selector} not found"))
}

fn size(pty: &PTY) -> (u16, u16) {
    let clamp = |value: u32| u16::try_from(value).unwrap_or(u16::MAX);
    (clamp(pty.size.cols), clamp(pty.size.rows))
}

async fn send(process: &Process, input: Option<&ProcessInput>) -> Result<(), ConnectError> {
    match input.and_then(|input| input.input.as_ref()) {
        Some(process_input::Input::Stdin(data)) => process.input.send(false, data).await,
        Some(process_input::Input::Pty(data)) => process.input.send(true, data).await,
        None => Err(ConnectError::invalid_argument(
            "input is either stdin or pty",
        )),
    }
}

impl rpc::Process for Processes {
    async fn list<'a>(
        &'a self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, ListRequest>,
    ) -> ServiceResult<impl Encodable<ListResponse> + Send + use<'a>> {
        let info = |process: Arc<Process>| ProcessInfo {
            config: process.config.clone().into(),
            pid: process.pid,
            tag: process.tag.clone(),
            ..Default::default()
        };
        let processes = self.0.processes.running().into_iter().map(info).collect();
        Response::ok(ListResponse {
            processes,
            ..Default::default()
        })
    }

    async fn connect(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ConnectRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<ConnectResponse> + Send + use<>>> {
        let selector = wanted(request.to_owned_message().process.as_option())?;
        let (pid, events) = match self
            .0
            .processes
            .find(&selector)
            .ok_or_else(|| not_found(&selector))?
        {
            Found::Running(process) => (process.pid, process.output.listen()),
            Found::Ended(pid, end) => (pid, output::already_over(end)),
        };
        let wrap = |event: ProcessEvent| ConnectResponse {
            event: event.into(),
            ..Default::default()
        };
        Ok(Stream::new(&ctx, pid, events, false).respond(wrap))
    }

    async fn start(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, StartRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<StartResponse> + Send + use<>>> {
        let mut request = request.to_owned_message();
        let config = request.process.take();
        let config = config.filter(|config| !config.cmd.is_empty());
        let config =
            config.ok_or_else(|| ConnectError::invalid_argument("process.cmd is required"))?;
        let request = Request {
            config,
            user: username(ctx.headers()),
            tag: request.tag,
            terminal: request.pty.as_option().map(size),
            stdin: request.stdin.unwrap_or(true),
            deadline: ctx.deadline().map(Instant::from_std),
        };
        // A task: a client that hangs up now must not leave a process that nobody knows.
        let launching = tokio::spawn(launch::launch(self.0.clone(), request));
        let (pid, events) = launching
            .await
            .map_err(|error| ConnectError::internal(error.to_string()))??;
        let wrap = |event: ProcessEvent| StartResponse {
            event: event.into(),
            ..Default::default()
        };
        Ok(Stream::new(&ctx, pid, events, true).respond(wrap))
    }

    async fn update<'a>(
        &'a self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, UpdateRequest>,
    ) -> ServiceResult<impl Encodable<UpdateResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.find(request.process.as_option())?;
        if let Some(pty) = request.pty.as_option() {
            let Input::Terminal(terminal) = &process.input else {
                return Err(ConnectError::failed_precondition(
                    "the process has no terminal",
                ));
            };
            let (columns, rows) = size(pty);
            terminal
                .resize(columns, rows)
                .map_err(|error| ConnectError::internal(error.to_string()))?;
        }
        Response::ok(UpdateResponse::default())
    }

    async fn stream_input<'a>(
        &'a self,
        _ctx: RequestContext,
        mut requests: InboundStream<StreamInputRequest>,
    ) -> ServiceResult<impl Encodable<StreamInputResponse> + Send + use<'a>> {
        use stream_input_request::Event as Message;
        let mut process = None;
        while let Some(request) = requests.next().await {
            match request?.to_owned_message().event {
                Some(Message::Start(start)) => {
                    process = Some(self.find(start.process.as_option())?)
                }
                Some(Message::Data(data)) => {
                    let process = process.as_ref();
                    let process = process
                        .ok_or_else(|| ConnectError::invalid_argument("data before start"))?;
                    send(process, data.input.as_option()).await?;
                }
                Some(Message::Keepalive(_)) | None => {}
            }
        }
        Response::ok(StreamInputResponse::default())
    }

    async fn send_input<'a>(
        &'a self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, SendInputRequest>,
    ) -> ServiceResult<impl Encodable<SendInputResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.find(request.process.as_option())?;
        send(&process, request.input.as_option()).await?;
        Response::ok(SendInputResponse::default())
    }

    async fn send_signal<'a>(
        &'a self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, SendSignalRequest>,
    ) -> ServiceResult<impl Encodable<SendSignalResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let selector = wanted(request.process.as_option())?;
        let signal = match request.signal.as_known() {
            Some(Signal::SIGNAL_SIGKILL) => SystemSignal::KILL,
            Some(Signal::SIGNAL_SIGTERM) => SystemSignal::TERM,
            _ => {
                return Err(ConnectError::invalid_argument(
                    "signal is SIGNAL_SIGTERM or SIGNAL_SIGKILL",
                ));
            }
        };
        let process = self
            .0
            .processes
            .find_running(&selector)
            .ok_or_else(|| not_found(&selector))?;
        if !self.0.processes.signal(process.pid, signal) {
            return Err(not_found(&selector));
        }
        Response::ok(SendSignalResponse::default())
    }

    async fn close_stdin<'a>(
        &'a self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, CloseStdinRequest>,
    ) -> ServiceResult<impl Encodable<CloseStdinResponse> + Send + use<'a>> {
        let process = self.find(request.to_owned_message().process.as_option())?;
        process.input.close().await?;
        Response::ok(CloseStdinResponse::default())
    }
}
