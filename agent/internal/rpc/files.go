package rpc

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"path"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	files "github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/inside"
	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Files is FilesystemService. Make it with NewFiles.
type Files struct {
	filesystemv1.UnimplementedFilesystemServiceServer

	processes *Processes
}

// NewFiles returns a FilesystemService for the same sandboxes.
func NewFiles(p *Processes) *Files { return &Files{processes: p} }

// helper connects to the helper of a user in the sandbox that a call is meant for.
func (f *Files) helper(ctx context.Context, user string) (*inside.Helper, error) {
	s, err := f.processes.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	h, err := s.Helper(ctx, user)
	return h, inside.Fault(err, "")
}

// call makes a call that is answered at once.
func (f *Files) call(ctx context.Context, user string, c *files.Call) (*files.Result, error) {
	h, err := f.helper(ctx, user)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	r, err := h.Call(c)
	return r, over(ctx, err)
}

// over classifies the error of a call, whose end may be that of its context.
func over(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return inside.FileFault(err)
}

// Stat describes a file.
func (f *Files) Stat(ctx context.Context, req *filesystemv1.StatRequest) (*filesystemv1.StatResponse, error) {
	r, err := f.call(ctx, req.GetUser(), &files.Call{Op: files.Stat, Path: []byte(req.GetPath()), Follow: req.GetFollow()})
	if err != nil {
		return nil, err
	}
	return &filesystemv1.StatResponse{File: fileOf(r.File)}, nil
}

// ListDirectory lists a directory.
func (f *Files) ListDirectory(ctx context.Context, req *filesystemv1.ListDirectoryRequest) (*filesystemv1.ListDirectoryResponse, error) {
	after, err := base64.RawURLEncoding.DecodeString(req.GetPageToken())
	if err != nil {
		return nil, fault.Field("page_token", "it is not that of an earlier response")
	}
	r, err := f.call(ctx, req.GetUser(), &files.Call{
		Op: files.List, Path: []byte(req.GetPath()), Depth: int(req.GetDepth()), Limit: int(req.GetPageSize()), After: after,
	})
	if err != nil {
		return nil, err
	}
	out := &filesystemv1.ListDirectoryResponse{}
	for i := range r.Files {
		out.Files = append(out.Files, fileOf(&r.Files[i]))
	}
	if n := len(r.Files); r.More && n > 0 {
		out.NextPageToken = base64.RawURLEncoding.EncodeToString(r.Files[n-1].Path)
	}
	return out, nil
}

// MakeDirectory makes a directory.
func (f *Files) MakeDirectory(ctx context.Context, req *filesystemv1.MakeDirectoryRequest) (*filesystemv1.MakeDirectoryResponse, error) {
	r, err := f.call(ctx, req.GetUser(), &files.Call{Op: files.MakeDir, Path: []byte(req.GetPath()), Mode: req.Mode})
	if err != nil {
		return nil, err
	}
	return &filesystemv1.MakeDirectoryResponse{File: fileOf(r.File), Made: r.Made}, nil
}

// Move renames a file.
func (f *Files) Move(ctx context.Context, req *filesystemv1.MoveRequest) (*filesystemv1.MoveResponse, error) {
	r, err := f.call(ctx, req.GetUser(), &files.Call{Op: files.Move, Path: []byte(req.GetPath()), NewPath: []byte(req.GetNewPath()), NoReplace: req.GetNoReplace()})
	if err != nil {
		return nil, err
	}
	return &filesystemv1.MoveResponse{File: fileOf(r.File)}, nil
}

// Remove removes a file or directory.
func (f *Files) Remove(ctx context.Context, req *filesystemv1.RemoveRequest) (*filesystemv1.RemoveResponse, error) {
	_, err := f.call(ctx, req.GetUser(), &files.Call{Op: files.Remove, Path: []byte(req.GetPath()), Recursive: req.GetRecursive(), MissingOK: req.GetMissingOk()})
	if err != nil {
		return nil, err
	}
	return &filesystemv1.RemoveResponse{}, nil
}

// ReadFile sends a file.
func (f *Files) ReadFile(req *filesystemv1.ReadFileRequest, stream grpc.ServerStreamingServer[filesystemv1.ReadFileResponse]) error {
	about := func(x *files.File) error { return stream.Send(&filesystemv1.ReadFileResponse{File: fileOf(x)}) }
	data := func(b []byte) error { return stream.Send(&filesystemv1.ReadFileResponse{Data: b}) }
	return f.send(stream.Context(), req.GetUser(), &files.Call{
		Op: files.Read, Path: []byte(req.GetPath()), Offset: req.GetOffset(), Length: req.GetLength(), Match: req.GetIfMatch(),
	}, about, data)
}

// ReadArchive sends a tar archive.
func (f *Files) ReadArchive(req *filesystemv1.ReadArchiveRequest, stream grpc.ServerStreamingServer[filesystemv1.ReadArchiveResponse]) error {
	none := func(*files.File) error { return nil }
	data := func(b []byte) error { return stream.Send(&filesystemv1.ReadArchiveResponse{Data: b}) }
	return f.send(stream.Context(), req.GetUser(), &files.Call{Op: files.ReadArchive, Path: []byte(req.GetPath()), Follow: req.GetFollow()}, none, data)
}

// send makes a call that is answered with data. gRPC has serialized a message when Send returns, so that one buffer is enough.
func (f *Files) send(ctx context.Context, user string, c *files.Call, about func(*files.File) error, data func([]byte) error) error {
	h, err := f.helper(ctx, user)
	if err != nil {
		return err
	}
	defer h.Close()
	r, err := h.Call(c)
	if err != nil {
		return over(ctx, err)
	}
	if err := about(r.File); err != nil {
		return err
	}
	buffer := make([]byte, files.Chunk)
	for {
		b, err := h.Data(buffer)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return over(ctx, err)
		}
		if err := data(b); err != nil {
			return err
		}
	}
}

// WriteFile writes a file.
func (f *Files) WriteFile(stream grpc.ClientStreamingServer[filesystemv1.WriteFileRequest, filesystemv1.WriteFileResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return noHeader(err)
	}
	header := first.GetHeader()
	if header == nil {
		return noHeader(io.EOF)
	}
	call := &files.Call{
		Op: files.Write, Path: []byte(header.GetPath()), Mode: header.Mode, Append: header.GetAppend(), Parents: header.GetMakeParents(),
		NoReplace: header.GetNoReplace(), Match: header.GetIfMatch(), Size: header.SizeBytes, Owner: header.GetOwner(),
	}
	if header.GetModifyTime() != nil {
		modified := header.GetModifyTime().AsTime()
		call.Modified = &modified
	}
	r, err := f.receive(stream, header.GetUser(), call, first)
	if err != nil {
		return err
	}
	return stream.SendAndClose(&filesystemv1.WriteFileResponse{File: fileOf(r.File), WrittenBytes: r.Bytes})
}

// WriteArchive unpacks a tar archive.
func (f *Files) WriteArchive(stream grpc.ClientStreamingServer[filesystemv1.WriteArchiveRequest, filesystemv1.WriteArchiveResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return noHeader(err)
	}
	header := first.GetHeader()
	if header == nil {
		return noHeader(io.EOF)
	}
	call := &files.Call{Op: files.WriteArchive, Path: []byte(header.GetPath()), Owners: header.GetOwners()}
	r, err := f.receive(stream, header.GetUser(), call, first)
	if err != nil {
		return err
	}
	return stream.SendAndClose(&filesystemv1.WriteArchiveResponse{Files: r.Count, WrittenBytes: r.Bytes})
}

func noHeader(err error) error {
	if errors.Is(err, io.EOF) {
		return fault.Field("header", "the first message says what to write")
	}
	return err
}

// pass passes data and that of all further messages on. The answer of the helper says why it takes no more.
func pass(stream grpc.ServerStream, field protowire.Number, h *inside.Helper, data []byte) error {
	refused := h.Send(data) != nil
	for !refused {
		var frame rpc.Frame
		err := stream.RecvMsg(&frame)
		if errors.Is(err, io.EOF) {
			_ = h.End()
			return nil
		}
		if err != nil {
			return err
		}
		err = frame.Bytes(field, func(b []byte) error {
			refused = h.Send(b) != nil
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// message is a message of a stream with data.
type message interface {
	proto.Message
	GetData() []byte
}

// receive makes a call with the data of a stream. The messages after the first one have nothing but data, which is passed on from where gRPC has it. A
// helper that refuses the call answers before all is sent, and takes no more.
func (f *Files) receive(stream grpc.ServerStream, user string, c *files.Call, first message) (*files.Result, error) {
	ctx, field := stream.Context(), first.ProtoReflect().Descriptor().Fields().ByName("data").Number()
	h, err := f.helper(ctx, user)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	if err := h.Begin(c); err != nil {
		return nil, over(ctx, err)
	}
	answers := make(chan error, 1)
	var answer *files.Result
	go func() {
		var err error
		answer, err = h.Answer()
		answers <- err
	}()
	if err := pass(stream, field, h, first.GetData()); err != nil {
		h.Close() // the helper gives the file up
		_ = <-answers
		return nil, err
	}
	err = <-answers
	return answer, over(ctx, err)
}

// WatchDirectory sends changes.
func (f *Files) WatchDirectory(req *filesystemv1.WatchDirectoryRequest, stream grpc.ServerStreamingServer[filesystemv1.WatchDirectoryResponse]) error {
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	h, err := f.helper(ctx, req.GetUser())
	if err != nil {
		return err
	}
	defer h.Close()
	if _, err := h.Call(&files.Call{Op: files.Watch, Path: []byte(req.GetPath()), Recursive: req.GetRecursive()}); err != nil {
		return over(ctx, err)
	}
	events, failed := make(chan *files.Event), make(chan error, 1)
	go func() { failed <- watched(ctx, h, events) }()
	ticker := f.processes.service.config.Clock.NewTicker(keepalive)
	defer ticker.Stop()
	for {
		out := &filesystemv1.WatchDirectoryResponse{Type: filesystemv1.WatchDirectoryResponse_TYPE_KEEPALIVE}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.processes.service.closing:
			return errStopping()
		case err := <-failed:
			return over(ctx, err)
		case <-ticker.C():
		case e := <-events:
			out = &filesystemv1.WatchDirectoryResponse{Type: eventType(e.Kind), Path: valid(string(e.Path)), Directory: e.Directory}
		}
		if err := stream.Send(out); err != nil {
			return err
		}
	}
}

// watched passes events on until the watch ends.
func watched(ctx context.Context, h *inside.Helper, events chan<- *files.Event) error {
	for {
		raw, err := h.Data(nil)
		if err != nil {
			return err
		}
		e := &files.Event{}
		if err := json.Unmarshal(raw, e); err != nil {
			return err
		}
		select {
		case events <- e:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func eventType(kind string) filesystemv1.WatchDirectoryResponse_Type {
	switch kind {
	case "started":
		return filesystemv1.WatchDirectoryResponse_TYPE_STARTED
	case "created":
		return filesystemv1.WatchDirectoryResponse_TYPE_CREATED
	case "written":
		return filesystemv1.WatchDirectoryResponse_TYPE_WRITTEN
	case "removed":
		return filesystemv1.WatchDirectoryResponse_TYPE_REMOVED
	case "moved":
		return filesystemv1.WatchDirectoryResponse_TYPE_MOVED
	case "attributes":
		return filesystemv1.WatchDirectoryResponse_TYPE_ATTRIBUTES
	case "overflow":
		return filesystemv1.WatchDirectoryResponse_TYPE_OVERFLOW
	}
	return filesystemv1.WatchDirectoryResponse_TYPE_UNSPECIFIED
}

// fileOf translates a file. What a sandbox says of it need not be text.
func fileOf(f *files.File) *filesystemv1.File {
	if f == nil {
		return &filesystemv1.File{}
	}
	name := path.Base(string(f.Path))
	out := &filesystemv1.File{
		Path: valid(string(f.Path)), Name: valid(name), SizeBytes: f.Size, Mode: f.Mode & 0o7777, Uid: f.UID, Gid: f.GID,
		Owner: valid(f.Owner), Group: valid(f.Group), ModifyTime: timestamppb.New(f.Modified), Target: valid(string(f.Target)), Etag: valid(f.Etag),
	}
	if !utf8.ValidString(name) {
		out.RawName = []byte(name)
	}
	switch f.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		out.Type = filesystemv1.FileType_FILE_TYPE_FILE
	case unix.S_IFDIR:
		out.Type = filesystemv1.FileType_FILE_TYPE_DIRECTORY
	case unix.S_IFLNK:
		out.Type = filesystemv1.FileType_FILE_TYPE_SYMLINK
	default:
		out.Type = filesystemv1.FileType_FILE_TYPE_OTHER
	}
	return out
}
