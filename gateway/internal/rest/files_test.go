package rest_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/rest"
	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// disk is a FilesystemService with files in memory, which keeps the conditions that an agent keeps.
type disk struct {
	filesystemv1.UnimplementedFilesystemServiceServer

	mu       sync.Mutex
	files    map[string][]byte
	version  int
	calls    []proto.Message
	ended    chan error // how each call with a body or an answer of bytes ended
	sent     int64      // bytes that ReadFile has sent
	truncate int        // ReadFile sends so many bytes less than the file has
}

func newDisk(files map[string]string) *disk {
	d := &disk{files: map[string][]byte{}, ended: make(chan error, 64)}
	for name, content := range files {
		d.files[name] = []byte(content)
	}
	return d
}

func (d *disk) record(m proto.Message) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, proto.Clone(m))
}

func (d *disk) about(path string) *filesystemv1.File {
	return &filesystemv1.File{
		Path: path, Type: filesystemv1.FileType_FILE_TYPE_FILE, SizeBytes: int64(len(d.files[path])),
		Etag: fmt.Sprintf("%x-%d", sha256.Sum256(d.files[path]), d.version)[56:],
	}
}

func missing(path string) error {
	return rpc.ToStatus(fault.New(errdefs.ErrNotFound, fault.FileNotFound, "%s: there is no such file or directory", path))
}

func changed(path string) error {
	return rpc.ToStatus(fault.New(errdefs.ErrFailedPrecondition, fault.FileChanged, "%s: it is another one now", path))
}

func (d *disk) Stat(_ context.Context, in *filesystemv1.StatRequest) (*filesystemv1.StatResponse, error) {
	d.record(in)
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.files[in.GetPath()]; !ok {
		return nil, missing(in.GetPath())
	}
	return &filesystemv1.StatResponse{File: d.about(in.GetPath())}, nil
}

func (d *disk) Remove(_ context.Context, in *filesystemv1.RemoveRequest) (*filesystemv1.RemoveResponse, error) {
	d.record(in)
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.files[in.GetPath()]; !ok && !in.GetMissingOk() {
		return nil, missing(in.GetPath())
	}
	delete(d.files, in.GetPath())
	return &filesystemv1.RemoveResponse{}, nil
}

func (d *disk) ReadFile(in *filesystemv1.ReadFileRequest, s grpc.ServerStreamingServer[filesystemv1.ReadFileResponse]) (err error) {
	defer func() { d.ended <- err }()
	d.record(in)
	d.mu.Lock()
	content, ok := d.files[in.GetPath()]
	about := d.about(in.GetPath())
	content = content[:max(len(content)-d.truncate, 0)]
	d.mu.Unlock()
	switch {
	case !ok:
		return missing(in.GetPath())
	case in.GetIfMatch() != "" && in.GetIfMatch() != about.GetEtag():
		return changed(in.GetPath())
	}
	if err := s.Send(&filesystemv1.ReadFileResponse{File: about}); err != nil {
		return err
	}
	content = content[min(int(in.GetOffset()), len(content)):]
	if n := int(in.GetLength()); n > 0 {
		content = content[:min(n, len(content))]
	}
	for len(content) > 0 {
		n := min(len(content), 64<<10)
		if err := s.Send(&filesystemv1.ReadFileResponse{Data: content[:n]}); err != nil {
			return err
		}
		d.mu.Lock()
		d.sent += int64(n)
		d.mu.Unlock()
		content = content[n:]
	}
	return nil
}

func (d *disk) WriteFile(s grpc.ClientStreamingServer[filesystemv1.WriteFileRequest, filesystemv1.WriteFileResponse]) (err error) {
	defer func() { d.ended <- err }()
	first, err := s.Recv()
	if err != nil {
		return err
	}
	d.record(first)
	h := first.GetHeader()
	d.mu.Lock()
	_, exists := d.files[h.GetPath()]
	tag := d.about(h.GetPath()).GetEtag()
	d.mu.Unlock()
	switch {
	case strings.HasPrefix(h.GetPath(), "/forbidden"):
		return rpc.ToStatus(fault.New(errdefs.ErrPermissionDenied, fault.FileAccessDenied, "%s: the user may not do that", h.GetPath()))
	case h.GetNoReplace() && exists:
		return rpc.ToStatus(fault.New(errdefs.ErrAlreadyExists, fault.FileExists, "%s: it exists", h.GetPath()))
	case h.GetIfMatch() != "" && h.GetIfMatch() != tag:
		return changed(h.GetPath())
	}
	var content []byte
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		content = append(content, m.GetData()...)
	}
	if h.SizeBytes != nil && h.GetSizeBytes() != int64(len(content)) {
		return rpc.ToStatus(fault.Field("header.size_bytes", "another number of bytes has arrived"))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.version++
	d.files[h.GetPath()] = content
	return s.SendAndClose(&filesystemv1.WriteFileResponse{File: d.about(h.GetPath()), WrittenBytes: int64(len(content))})
}

func (d *disk) ReadArchive(in *filesystemv1.ReadArchiveRequest, s grpc.ServerStreamingServer[filesystemv1.ReadArchiveResponse]) (err error) {
	defer func() { d.ended <- err }()
	d.record(in)
	if in.GetPath() == "/missing" {
		return missing(in.GetPath())
	}
	for _, piece := range []string{"tar ", "of ", in.GetPath()} {
		if err := s.Send(&filesystemv1.ReadArchiveResponse{Data: []byte(piece)}); err != nil {
			return err
		}
	}
	if in.GetPath() == "/breaks" {
		return rpc.ToStatus(fault.New(errdefs.ErrResourceExhausted, fault.SandboxLimitExceeded, "open files"))
	}
	return nil
}

func (d *disk) WriteArchive(s grpc.ClientStreamingServer[filesystemv1.WriteArchiveRequest, filesystemv1.WriteArchiveResponse]) (err error) {
	defer func() { d.ended <- err }()
	first, err := s.Recv()
	if err != nil {
		return err
	}
	d.record(first)
	var n int64
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return s.SendAndClose(&filesystemv1.WriteArchiveResponse{Files: 1, WrittenBytes: n})
		}
		if err != nil {
			return err
		}
		n += int64(len(m.GetData()))
	}
}

// inside is the REST API in front of services of sandboxes, over HTTP/1.1 or HTTP/2.
type inside struct {
	url      string
	client   *http.Client
	draining chan struct{}
	registry *prometheus.Registry
}

// newInside serves both; a nil processes serves none.
func newInside(t *testing.T, http2 bool, files filesystemv1.FilesystemServiceServer, processes processv1.ProcessServiceServer, change ...func(*rest.Config)) *inside {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	if files != nil {
		filesystemv1.RegisterFilesystemServiceServer(server, files)
	}
	if processes != nil {
		processv1.RegisterProcessServiceServer(server, processes)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///agent", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	require.NoError(t, err)
	s := &inside{draining: make(chan struct{}), registry: prometheus.NewRegistry()}
	cfg := rest.Config{
		Allocator: &upstream{}, Collector: &upstream{}, Sandboxes: conn, Files: conn, Ready: func(context.Context) error { return nil },
		MaxBodyBytes: 1 << 10, RequestTimeout: testkit.Timeout, Draining: s.draining, Registry: s.registry, Log: logr.Discard(), Clock: clock.RealClock{},
	}
	for _, c := range change {
		c(&cfg)
	}
	handler, err := rest.New(cfg)
	require.NoError(t, err)
	web := httptest.NewUnstartedServer(handler)
	if web.EnableHTTP2 = http2; http2 {
		web.StartTLS()
	} else {
		web.Start()
	}
	s.url, s.client = web.URL, web.Client()
	t.Cleanup(func() {
		web.CloseClientConnections()
		web.Close()
		require.NoError(t, conn.Close())
		server.Stop()
		require.NoError(t, <-served)
	})
	return s
}

const filesOf = "/v1/namespaces/ns/sandboxes/a/files"

// do sends a request.
func (s *inside) do(t *testing.T, method, path string, body io.Reader, headers ...string) (reply, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.url+path, body)
	require.NoError(t, err)
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := s.client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return replyOf(resp), string(raw)
}

// reply is a response without its body.
type reply struct {
	Method        string
	StatusCode    int
	Header        http.Header
	ContentLength int64
}

func replyOf(r *http.Response) reply {
	return reply{r.Request.Method, r.StatusCode, r.Header, r.ContentLength}
}

func bothVersions(t *testing.T, test func(t *testing.T, http2 bool)) {
	t.Helper()
	for _, http2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("http2=%t", http2), func(t *testing.T) { test(t, http2) })
	}
}

func TestReadFile(t *testing.T) {
	bothVersions(t, func(t *testing.T, http2 bool) {
		d := newDisk(map[string]string{"/a b": "0123456789", "/empty": ""})
		s := newInside(t, http2, d, nil)
		resp, body := s.do(t, "GET", filesOf+"?path=/a%20b&user=bob", nil)
		require.Equal(t, http.StatusOK, resp.StatusCode)
		require.Equal(t, "0123456789", body)
		tag := resp.Header.Get("ETag")
		require.Regexp(t, `^"[^"]+"$`, tag)
		for header, want := range map[string]string{
			"Content-Type": "application/octet-stream", "Content-Length": "10", "Accept-Ranges": "bytes", "Content-Disposition": `attachment; filename="a b"`,
			"X-Content-Type-Options": "nosniff", "Cache-Control": "private, no-cache",
		} {
			require.Equal(t, want, resp.Header.Get(header), header)
		}
		require.Equal(t, "bob", d.calls[0].(*filesystemv1.ReadFileRequest).GetUser()) //nolint:forcetypeassert // a test
		require.Len(t, d.calls, 1, "a whole file is one call")

		for name, tc := range map[string]struct {
			headers []string
			code    int
			body    string
			ranged  string
		}{
			"a range":                  {[]string{"Range", "bytes=2-4"}, 206, "234", "bytes 2-4/10"},
			"from an offset":           {[]string{"Range", "bytes=7-"}, 206, "789", "bytes 7-9/10"},
			"the end":                  {[]string{"Range", "bytes=-2"}, 206, "89", "bytes 8-9/10"},
			"more than there is":       {[]string{"Range", "bytes=8-100"}, 206, "89", "bytes 8-9/10"},
			"several ranges":           {[]string{"Range", "bytes=0-1,4-5"}, 200, "0123456789", ""},
			"the caller has it":        {[]string{"If-None-Match", tag}, 304, "", ""},
			"the caller has another":   {[]string{"If-None-Match", `"other"`}, 200, "0123456789", ""},
			"the expected one":         {[]string{"If-Match", tag}, 200, "0123456789", ""},
			"the same, for a range":    {[]string{"Range", "bytes=2-4", "If-Range", tag}, 206, "234", "bytes 2-4/10"},
			"another one, for a range": {[]string{"Range", "bytes=2-4", "If-Range", `"other"`}, 200, "0123456789", ""},
			"a weak tag for a range":   {[]string{"Range", "bytes=2-4", "If-Range", "W/" + tag}, 200, "0123456789", ""},
		} {
			t.Run(name, func(t *testing.T) {
				resp, body := s.do(t, "GET", filesOf+"?path=/a%20b", nil, tc.headers...)
				require.Equal(t, tc.code, resp.StatusCode, body)
				require.Equal(t, tc.body, body)
				require.Equal(t, tc.ranged, resp.Header.Get("Content-Range"))
				require.Equal(t, tag, resp.Header.Get("ETag"))
			})
		}
		resp, body = s.do(t, "HEAD", filesOf+"?path=/a%20b", nil)
		require.Equal(t, http.StatusOK, resp.StatusCode)
		require.EqualValues(t, 10, resp.ContentLength)
		require.Equal(t, tag, resp.Header.Get("ETag"))
		require.Empty(t, body)
		resp, body = s.do(t, "GET", filesOf+"?path=/empty", nil)
		require.Equal(t, http.StatusOK, resp.StatusCode)
		require.Empty(t, body)
		resp, body = s.do(t, "GET", filesOf+":stat?path=/empty", nil)
		require.Equal(t, http.StatusOK, resp.StatusCode)
		require.Contains(t, body, `"FILE_TYPE_FILE"`, "the unary methods are routed")
	})
}

// requireRefused checks that an answer is google.rpc.Status with a reason and the field that is wrong.
func requireRefused(t *testing.T, resp reply, body string, code int, reason fault.Reason, field string) {
	t.Helper()
	require.Equal(t, code, resp.StatusCode, body)
	require.Equal(t, "application/json", resp.Header.Get("Content-Type"))
	if resp.Method == http.MethodHead {
		return
	}
	require.Contains(t, body, `"reason":"`+string(reason)+`"`)
	require.Contains(t, body, `"domain":"fast-sandbox.io"`)
	if field != "" {
		require.Contains(t, body, `"field":"`+field+`"`)
	}
	require.Empty(t, resp.Header.Get("ETag"))
	require.Empty(t, resp.Header.Get("Content-Disposition"))
}

func TestFilesThatAreRefused(t *testing.T) {
	s := newInside(t, false, newDisk(map[string]string{"/a": "0123456789"}), nil)
	for name, tc := range map[string]struct {
		method, query string
		headers       []string
		code          int
		reason        fault.Reason
		field         string
	}{
		"no path":                   {"GET", "", nil, 400, fault.InvalidField, "path"},
		"empty path":                {"PUT", "?path=", nil, 400, fault.InvalidField, "path"},
		"two paths":                 {"GET", "?path=/a&path=/b", nil, 400, fault.InvalidField, "path"},
		"a name in both forms":      {"PUT", "?path=/a&makeParents=true&make_parents=true", nil, 400, fault.InvalidField, "make_parents"},
		"unknown parameter":         {"GET", "?path=/a&offset=1", nil, 400, fault.InvalidField, "offset"},
		"parameter of a write":      {"GET", "?path=/a&mode=644", nil, 400, fault.InvalidField, "mode"},
		"broken query":              {"GET", "?path=%zz", nil, 400, fault.InvalidField, "query"},
		"path that is not UTF-8":    {"GET", "?path=%ff", nil, 400, fault.InvalidField, "query"},
		"another format":            {"GET", "?path=/a&archive=zip", nil, 400, fault.InvalidField, "archive"},
		"removal of an archive":     {"DELETE", "?path=/a&archive=tar", nil, 400, fault.InvalidField, "archive"},
		"no such file":              {"GET", "?path=/x", nil, 404, fault.FileNotFound, ""},
		"no such file, head":        {"HEAD", "?path=/x", nil, 404, fault.FileNotFound, ""},
		"no such directory":         {"GET", "?path=/missing&archive=tar", nil, 404, fault.FileNotFound, ""},
		"removal of nothing":        {"DELETE", "?path=/x", nil, 404, fault.FileNotFound, ""},
		"conditional removal":       {"DELETE", "?path=/a", []string{"If-Match", `"a"`}, 400, fault.InvalidField, "If-Match"},
		"range beyond the end":      {"GET", "?path=/a", []string{"Range", "bytes=10-"}, 416, fault.InvalidField, "Range"},
		"no range at all":           {"GET", "?path=/a", []string{"Range", "bytes=x"}, 416, fault.InvalidField, "Range"},
		"another file, read":        {"GET", "?path=/a", []string{"If-Match", `"x"`}, 412, fault.FileChanged, ""},
		"another file, written":     {"PUT", "?path=/a", []string{"If-Match", `"x"`}, 412, fault.FileChanged, ""},
		"any file, written":         {"PUT", "?path=/a", []string{"If-Match", `*`}, 400, fault.InvalidField, "If-Match"},
		"weak tag":                  {"PUT", "?path=/a", []string{"If-Match", `W/"x"`}, 400, fault.InvalidField, "If-Match"},
		"file that exists":          {"PUT", "?path=/a", []string{"If-None-Match", `*`}, 412, fault.FileExists, ""},
		"the same by parameter":     {"PUT", "?path=/a&noReplace=true", nil, 409, fault.FileExists, ""},
		"unless it is one":          {"PUT", "?path=/a", []string{"If-None-Match", `"x"`}, 400, fault.InvalidField, "If-None-Match"},
		"part of a file":            {"PUT", "?path=/a", []string{"Content-Range", "bytes 0-1/10"}, 400, fault.InvalidField, "Content-Range"},
		"compressed body":           {"PUT", "?path=/a", []string{"Content-Encoding", "gzip"}, 415, fault.InvalidField, "Content-Encoding"},
		"compressed archive":        {"PUT", "?path=/a&archive=tar", []string{"Content-Encoding", "gzip"}, 415, fault.InvalidField, "Content-Encoding"},
		"mode that is no number":    {"PUT", "?path=/a&mode=rw", nil, 400, fault.InvalidField, "mode"},
		"mode that is not octal":    {"PUT", "?path=/a&mode=888", nil, 400, fault.InvalidField, "mode"},
		"mode that is too large":    {"PUT", "?path=/a&mode=100644", nil, 400, fault.InvalidField, "mode"},
		"negative mode":             {"PUT", "?path=/a&mode=-1", nil, 400, fault.InvalidField, "mode"},
		"flag that is neither":      {"PUT", "?path=/a&append=yes", nil, 400, fault.InvalidField, "append"},
		"not permitted":             {"PUT", "?path=/forbidden", nil, 403, fault.FileAccessDenied, ""},
		"owners that are no flag":   {"PUT", "?path=/a&archive=tar&owners=1", nil, 400, fault.InvalidField, "owners"},
		"recursive that is no flag": {"DELETE", "?path=/a&recursive=1", nil, 400, fault.InvalidField, "recursive"},
	} {
		t.Run(name, func(t *testing.T) {
			var body io.Reader
			if tc.method == http.MethodPut {
				body = strings.NewReader("new")
			}
			resp, text := s.do(t, tc.method, filesOf+tc.query, body, tc.headers...)
			requireRefused(t, resp, text, tc.code, tc.reason, tc.field)
		})
	}
	resp, body := s.do(t, "POST", filesOf+"?path=/a", nil)
	require.Equal(t, http.StatusMethodNotAllowed, resp.StatusCode, body)
	require.Equal(t, "GET, HEAD, PUT, DELETE", resp.Header.Get("Allow"))
	_, body = s.do(t, "GET", filesOf+"?path=/a", nil)
	require.Equal(t, "0123456789", body, "nothing of all this wrote it")
}

func TestWriteFile(t *testing.T) {
	bothVersions(t, func(t *testing.T, http2 bool) {
		d := newDisk(nil)
		s := newInside(t, http2, d, nil)
		large := bytes.Repeat([]byte("0123456789abcdef"), 100_000) // many pieces, more than a JSON body may have
		resp, body := s.do(t, "PUT", filesOf+"?path=/a&mode=0600&user=u&owner=u:g&make_parents=true", bytes.NewReader(large))
		require.Equal(t, http.StatusOK, resp.StatusCode, body)
		require.Equal(t, large, d.files["/a"])
		require.Contains(t, body, `"writtenBytes":"1600000"`)
		want := &filesystemv1.WriteFileRequest{Namespace: "ns", Name: "a", Header: &filesystemv1.WriteFileHeader{
			Path: "/a", User: "u", Owner: "u:g", MakeParents: true, Mode: proto.Uint32(0o600), SizeBytes: proto.Int64(1_600_000),
		}}
		require.True(t, proto.Equal(want, d.calls[0]), protojson.Format(d.calls[0]))

		tag := resp.Header.Get("ETag")
		resp, body = s.do(t, "PUT", filesOf+"?path=/a", strings.NewReader("second"), "If-Match", tag)
		require.Equal(t, http.StatusOK, resp.StatusCode, body)
		require.NotEqual(t, tag, resp.Header.Get("ETag"))
		resp, body = s.do(t, "PUT", filesOf+"?path=/a", strings.NewReader("third"), "If-Match", tag)
		requireRefused(t, resp, body, http.StatusPreconditionFailed, fault.FileChanged, "")
		require.Equal(t, "second", string(d.files["/a"]))

		resp, body = s.do(t, "PUT", filesOf+"?path=/new", io.MultiReader(strings.NewReader("no "), strings.NewReader("length")), "If-None-Match", "*")
		require.Equal(t, http.StatusOK, resp.StatusCode, body)
		require.Equal(t, "no length", string(d.files["/new"]))
		resp, body = s.do(t, "PUT", filesOf+"?path=/empty", nil)
		require.Equal(t, http.StatusOK, resp.StatusCode, body)
		require.Contains(t, d.files, "/empty")

		resp, body = s.do(t, "DELETE", filesOf+"?path=/empty&recursive=true&missing_ok=true", nil)
		require.Equal(t, http.StatusOK, resp.StatusCode)
		require.Equal(t, "{}", body)
		require.NotContains(t, d.files, "/empty")
	})
}

func TestArchives(t *testing.T) {
	d := newDisk(nil)
	s := newInside(t, false, d, nil)
	resp, body := s.do(t, "GET", filesOf+"?path=/dir/&archive=tar&follow=true", nil)
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Equal(t, "tar of /dir/", body)
	require.Equal(t, "application/x-tar", resp.Header.Get("Content-Type"))
	require.Equal(t, "attachment; filename=dir.tar", resp.Header.Get("Content-Disposition"))
	require.True(t, d.calls[0].(*filesystemv1.ReadArchiveRequest).GetFollow()) //nolint:forcetypeassert // a test
	resp, _ = s.do(t, "HEAD", filesOf+"?path=/dir&archive=tar", nil)
	require.Equal(t, http.StatusOK, resp.StatusCode)

	broken, err := s.client.Get(s.url + filesOf + "?path=/breaks&archive=tar") //nolint:noctx // a test
	if err == nil {
		_, err = io.ReadAll(broken.Body)
		require.NoError(t, broken.Body.Close())
	}
	require.Error(t, err, "an archive that breaks off must not look complete")

	resp, body = s.do(t, "PUT", filesOf+"?path=/dir&archive=tar&owners=true", strings.NewReader("archive"))
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Equal(t, `{"files":"1","writtenBytes":"7"}`, body)
}
