package rest

import (
	"context"
	"errors"
	"net/http"
	"strconv"

	"github.com/containerd/errdefs"
	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// filesPath is the path of the contents of files. No HTTP binding describes it: its bodies are bytes and not JSON.
const filesPath = "/v1/namespaces/{namespace}/sandboxes/{name}/files"

// filesAllowed are the methods of filesPath.
const filesAllowed = "GET, HEAD, PUT, DELETE"

// contents serves the contents of files. It passes bytes on as they come, no faster than the other side takes them.
type contents struct {
	api     *api
	service filesystemv1.FilesystemServiceClient
}

func newContents(a *api) *contents {
	return &contents{a, filesystemv1.NewFilesystemServiceClient(rpc.OnBehalf(a.config.Files))}
}

// operation is what a request for filesPath asks for.
type operation struct {
	// method of FilesystemService that does it.
	method protoreflect.Name
	// parameters that it has besides path, user and archive.
	parameters []string
	serve      func(w http.ResponseWriter, r *http.Request, p parameters) error
}

// operation returns the operation of a request; false if there is none.
func (c *contents) operation(verb string, archive bool) (operation, bool) {
	type key struct {
		verb    string
		archive bool
	}
	all := map[key]operation{
		{http.MethodGet, false}:    {"ReadFile", nil, c.read},
		{http.MethodHead, false}:   {"ReadFile", nil, c.read},
		{http.MethodPut, false}:    {"WriteFile", []string{"mode", "owner", "append", "makeParents", "noReplace"}, c.write},
		{http.MethodDelete, false}: {"Remove", []string{"recursive", "missingOk"}, c.remove},
		{http.MethodGet, true}:     {"ReadArchive", []string{"follow"}, c.readArchive},
		{http.MethodHead, true}:    {"ReadArchive", []string{"follow"}, c.readArchive},
		{http.MethodPut, true}:     {"WriteArchive", []string{"owners"}, c.writeArchive},
	}
	o, ok := all[key{verb, archive}]
	return o, ok
}

// ServeHTTP implements http.Handler.
func (c *contents) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.api.withoutDeadlines(w)
	ctx, e := r.Context(), exchangeOf(r.Context())
	e.route = filesPath
	archive := r.URL.Query().Get("archive") != ""
	op, ok := c.operation(r.Method, archive)
	switch {
	case !ok && archive && r.Method == http.MethodDelete:
		c.api.writeError(ctx, w, fault.Field("archive", "DELETE has no archives"), 0)
		return
	case !ok:
		w.Header().Set("Allow", filesAllowed)
		c.api.writeStatus(ctx, w, ownStatus(codes.Unimplemented, r.Method+" is not allowed on "+r.URL.Path), http.StatusMethodNotAllowed)
		return
	}
	e.binding = &route{method: filesystemService().Methods().ByName(op.method), upstream: upstream{name: sandboxesName}}
	p, err := parametersOf(r, append([]string{"path", "user", "archive"}, op.parameters...)...)
	if err == nil {
		err = p.check()
	}
	if err == nil {
		describe(ctx, p)
		err = op.serve(w, r, p)
	}
	if err != nil {
		c.refuse(w, r, err)
	}
}

// describe says on the span what a request is about.
func describe(ctx context.Context, p parameters) {
	e, span := exchangeOf(ctx), trace.SpanFromContext(ctx)
	span.SetName(e.route)
	span.SetAttributes(attribute.String(obs.AttrHTTPRoute, e.route), attribute.String(obs.AttrRequestID, e.requestID),
		attribute.String(obs.AttrSandboxNamespace, p.namespace), attribute.String(obs.AttrSandboxName, p.name))
}

// check checks what all operations have in common.
func (p parameters) check() error {
	if p.text("path") == "" {
		return fault.Field("path", "is required")
	}
	if a, ok := p.values["archive"]; ok && a != "tar" {
		return fault.Field("archive", "%q is not supported; the only format is tar", a)
	}
	return nil
}

// refuse answers with an error. One that a condition of the request is about has the code that HTTP has for it.
func (c *contents) refuse(w http.ResponseWriter, r *http.Request, err error) {
	var own *runtime.HTTPStatusError
	code := 0
	if errors.As(err, &own) {
		code, err = own.HTTPStatus, own.Err
	}
	reason := fault.ReasonOf(rpc.FromStatus(err))
	conditional := r.Header.Get("If-Match") != "" || r.Header.Get("If-None-Match") != ""
	switch {
	case conditional && (reason == fault.FileChanged || reason == fault.FileExists):
		code = http.StatusPreconditionFailed
	case reason == fault.FileChanged:
		code = http.StatusConflict
	}
	c.api.writeError(r.Context(), w, err, code)
}

// remove removes a file or directory.
func (c *contents) remove(w http.ResponseWriter, r *http.Request, p parameters) error {
	if r.Header.Get("If-Match") != "" || r.Header.Get("If-None-Match") != "" {
		return fault.Field("If-Match", "a removal has no conditions")
	}
	recursive, err := p.flag("recursive")
	if err != nil {
		return err
	}
	missing, err := p.flag("missingOk")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), c.api.config.RequestTimeout)
	defer cancel()
	resp, err := c.service.Remove(ctx, &filesystemv1.RemoveRequest{
		Namespace: p.namespace, Name: p.name, User: p.text("user"), Path: p.text("path"), Recursive: recursive, MissingOk: missing,
	})
	if err != nil {
		return err
	}
	return c.answer(w, resp)
}

// answer answers with a message.
func (c *contents) answer(w http.ResponseWriter, m proto.Message) error {
	body, err := c.api.json.Marshal(m)
	if err != nil {
		return fault.Wrap(err, errdefs.ErrInternal, fault.Internal, "marshaling the answer")
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	if _, err := w.Write(body); err != nil {
		c.api.config.Log.V(2).Info("writing response", obs.KeyError, err.Error())
	}
	return nil
}
