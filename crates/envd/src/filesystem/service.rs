//! The RPCs of `filesystem.Filesystem`. Watching is answered `unimplemented`.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use connectrpc::{
    ConnectError, Encodable, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream,
};

use super::{entry, tree};
use crate::environment;
use crate::http::auth::username;
use crate::proto::filesystem::{self as rpc, *};
use crate::state::{Agent, blocking};
use crate::users::{Accounts, User};

/// The service.
pub struct Filesystem(pub Arc<Agent>);

/// What an operation works with, on the blocking pool.
struct Call {
    user: User,
    default_workdir: Option<String>,
}

impl Call {
    fn resolve(&self, path: &str) -> PathBuf {
        environment::resolve(path, &self.user, self.default_workdir.as_deref())
    }
}

impl Filesystem {
    async fn run<T: Send + 'static>(
        &self,
        ctx: &RequestContext,
        operation: impl FnOnce(&Call) -> Result<T, ConnectError> + Send + 'static,
    ) -> Result<T, ConnectError> {
        let (agent, name) = (self.0.clone(), username(ctx.headers()));
        let result = blocking(move || {
            let user = agent.user(name.as_deref());
            let user = user.map_err(|name| {
                ConnectError::unauthenticated(format!("invalid username: '{name}'"))
            })?;
            let default_workdir = agent.settings().default_workdir.clone();
            operation(&Call {
                user,
                default_workdir,
            })
        });
        result
            .await
            .map_err(|error| ConnectError::internal(error.to_string()))?
    }
}

fn failed(path: &Path, error: &io::Error) -> ConnectError {
    let message = format!("{}: {error}", path.display());
    match error.kind() {
        ErrorKind::NotFound => ConnectError::not_found(message),
        ErrorKind::AlreadyExists => ConnectError::already_exists(message),
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            ConnectError::permission_denied(message)
        }
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            ConnectError::resource_exhausted(message)
        }
        ErrorKind::InvalidInput
        | ErrorKind::InvalidFilename
        | ErrorKind::NotADirectory
        | ErrorKind::IsADirectory
        | ErrorKind::DirectoryNotEmpty => ConnectError::invalid_argument(message),
        ErrorKind::ResourceBusy => ConnectError::failed_precondition(message),
        _ if error.raw_os_error() == Some(libc::ELOOP) => ConnectError::invalid_argument(message),
        _ => ConnectError::internal(message),
    }
}

fn describe(path: &Path) -> Result<EntryInfo, ConnectError> {
    entry::describe(path, &Accounts::load()).map_err(|error| failed(path, &error))
}

fn not_watching() -> ConnectError {
    ConnectError::unimplemented("watching directories is not supported")
}

fn required(path: &str) -> Result<(), ConnectError> {
    if path.is_empty() {
        Err(ConnectError::invalid_argument("path is required"))
    } else {
        Ok(())
    }
}

fn make_dir(path: &Path, user: &User) -> Result<EntryInfo, ConnectError> {
    match path.metadata() {
        Ok(metadata) if metadata.is_dir() => {
            return Err(ConnectError::already_exists(format!(
                "{}: the directory exists",
                path.display()
            )));
        }
        Ok(_) => {
            return Err(ConnectError::invalid_argument(format!(
                "{}: exists and is no directory",
                path.display()
            )));
        }
        Err(_) => {}
    }
    tree::make_directories(path, user).map_err(|error| failed(path, &error))?;
    describe(path)
}

fn list_dir(path: &Path, depth: u32) -> Result<Vec<EntryInfo>, ConnectError> {
    let paths = tree::walk(path, depth).map_err(|error| failed(path, &error))?;
    let accounts = Accounts::load();
    // An entry may vanish between the walk and its description.
    Ok(paths
        .iter()
        .filter_map(|path| entry::describe(path, &accounts).ok())
        .collect())
}

impl rpc::Filesystem for Filesystem {
    async fn stat<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, StatRequest>,
    ) -> ServiceResult<impl Encodable<StatResponse> + Send + use<'a>> {
        let path = request.path.to_owned();
        let entry = self
            .run(&ctx, move |call| describe(&call.resolve(&path)))
            .await?;
        Response::ok(StatResponse {
            entry: entry.into(),
            ..Default::default()
        })
    }

    async fn make_dir<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, MakeDirRequest>,
    ) -> ServiceResult<impl Encodable<MakeDirResponse> + Send + use<'a>> {
        let path = request.path.to_owned();
        let entry = self
            .run(&ctx, move |call| make_dir(&call.resolve(&path), &call.user))
            .await?;
        Response::ok(MakeDirResponse {
            entry: entry.into(),
            ..Default::default()
        })
    }

    async fn r#move<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, MoveRequest>,
    ) -> ServiceResult<impl Encodable<MoveResponse> + Send + use<'a>> {
        let (source, destination) = (request.source.to_owned(), request.destination.to_owned());
        required(&source).and(required(&destination))?;
        let entry = self.run(&ctx, move |call| {
            let (source, destination) = (call.resolve(&source), call.resolve(&destination));
            tree::rename(&source, &destination, &call.user)
                .map_err(|error| failed(&source, &error))?;
            describe(&destination)
        });
        Response::ok(MoveResponse {
            entry: entry.await?.into(),
            ..Default::default()
        })
    }

    async fn list_dir<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ListDirRequest>,
    ) -> ServiceResult<impl Encodable<ListDirResponse> + Send + use<'a>> {
        let (path, depth) = (request.path.to_owned(), request.depth.max(1));
        let entries = self
            .run(&ctx, move |call| list_dir(&call.resolve(&path), depth))
            .await?;
        Response::ok(ListDirResponse {
            entries,
            ..Default::default()
        })
    }

    async fn remove<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, RemoveRequest>,
    ) -> ServiceResult<impl Encodable<RemoveResponse> + Send + use<'a>> {
        let path = request.path.to_owned();
        required(&path)?;
        let removed = self.run(&ctx, move |call| {
            let path = call.resolve(&path);
            tree::remove(&path).map_err(|error| failed(&path, &error))
        });
        removed.await?;
        Response::ok(RemoveResponse::default())
    }

    async fn watch_dir(
        &self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, WatchDirRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<WatchDirResponse> + Send + use<>>> {
        Err::<Response<ServiceStream<WatchDirResponse>>, _>(not_watching())
    }

    async fn create_watcher<'a>(
        &'a self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, CreateWatcherRequest>,
    ) -> ServiceResult<impl Encodable<CreateWatcherResponse> + Send + use<'a>> {
        Err::<Response<CreateWatcherResponse>, _>(not_watching())
    }

    async fn get_watcher_events<'a>(
        &'a self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, GetWatcherEventsRequest>,
    ) -> ServiceResult<impl Encodable<GetWatcherEventsResponse> + Send + use<'a>> {
        Err::<Response<GetWatcherEventsResponse>, _>(not_watching())
    }

    async fn remove_watcher<'a>(
        &'a self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, RemoveWatcherRequest>,
    ) -> ServiceResult<impl Encodable<RemoveWatcherResponse> + Send + use<'a>> {
        Err::<Response<RemoveWatcherResponse>, _>(not_watching())
    }
}
