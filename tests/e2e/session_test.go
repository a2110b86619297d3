//go:build e2e

package e2e_test

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// companion is a program that runs beside the test, as one that a user leaves running.
type companion struct {
	stdin io.WriteCloser
	end   func()

	mu    sync.Mutex
	lines []string
}

// background starts a program. It is killed when the test ends.
func background(t *testing.T, name string, args ...string) *companion {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	reader, writer := io.Pipe()
	cmd.Stdout, cmd.Stderr = writer, writer
	require.NoError(t, cmd.Start())
	c := &companion{stdin: stdin}
	var wg sync.WaitGroup
	wg.Go(func() {
		for scanner := bufio.NewScanner(reader); scanner.Scan(); {
			c.mu.Lock()
			c.lines = append(c.lines, scanner.Text())
			c.mu.Unlock()
		}
	})
	c.end = sync.OnceFunc(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
		_ = writer.Close()
		wg.Wait()
	})
	t.Cleanup(c.end)
	return c
}

func (c *companion) write(t *testing.T, text string) {
	t.Helper()
	_, err := io.WriteString(c.stdin, text)
	require.NoError(t, err)
}

// await waits for a line that contains a text, and returns it.
func (c *companion) await(t *testing.T, text string) string {
	t.Helper()
	found := ""
	ok := eventually(settle, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, line := range c.lines {
			if strings.Contains(line, text) {
				found = line
				return true
			}
		}
		return false
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	require.True(t, ok, "no line has %q:\n%s", text, strings.Join(c.lines, "\n"))
	return found
}

// server is the command of a server that only the sandbox itself reaches. Its files are those of /srv.
func server(port string) []string {
	return []string{"python3", "-m", "http.server", port, "--bind", "127.0.0.1", "--directory", "/tmp/srv"}
}

// quoted returns arguments as JSON.
func quoted(args ...string) string {
	raw, _ := json.Marshal(args) // strings always marshal
	return string(raw)
}

func encoded(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }

const (
	program = "print('from', 'a file')\n"
	hello   = "/tmp/srv/hello.py"
)

// TestSessionByFsbCtl is the session of an agent, by fsb-ctl alone.
func TestSessionByFsbCtl(t *testing.T) {
	fsb, name, port := cluster.Binary(t, "fsb-ctl"), uniqueName("session"), "8391"
	cluster.OK(t, "fsb-ctl", "run", name, "--keep-alive", "--image", cluster.Python)
	uid := customResource(t, name, running).EffectiveUID()
	require.Equal(t, "42\n", cluster.OK(t, "fsb-ctl", "exec", name, "--", "python3", "-c", "print(6*7)"))
	cluster.OK(t, "fsb-ctl", "exec", name, "--", "mkdir", "/tmp/srv")
	watch := background(t, fsb, "watch", name+":/tmp/srv")
	watch.await(t, "STARTED")
	r := cluster.Run(t, program, "fsb-ctl", "cp", "-", name+":"+hello)
	require.Zero(t, r.Code, r.Stderr)
	watch.await(t, hello)
	require.Equal(t, program, cluster.OK(t, "fsb-ctl", "cp", name+":"+hello, "-"))
	require.Equal(t, "from a file\n", cluster.OK(t, "fsb-ctl", "exec", name, "--", "python3", hello))

	shell := background(t, fsb, "exec", "-i", "--tag", "shell", name, "--", "sh")
	shell.write(t, "cd /usr; x=kept; echo ready\n")
	shell.await(t, "ready")
	shell.end()
	shell = background(t, fsb, "attach", name, "shell")
	shell.write(t, "echo $x in $PWD\n")
	shell.await(t, "kept in /usr")
	cluster.OK(t, "fsb-ctl", "kill", name, "shell", "-s", "KILL")

	cluster.OK(t, "fsb-ctl", append([]string{"exec", "-d", "--tag", "server", name, "--"}, server(port)...)...)
	forward := background(t, fsb, "port-forward", name, ":"+port, "-o", "json")
	_, local, _ := strings.Cut(forward.await(t, "localPort"), ": ")
	require.True(t, eventually(settle, func() bool {
		resp, err := http.Get("http://" + net.JoinHostPort("127.0.0.1", strings.Trim(local, ",")) + "/hello.py")
		if err != nil {
			return false
		}
		defer func() { _ = resp.Body.Close() }()
		body, _ := io.ReadAll(resp.Body)
		return string(body) == program
	}))
	cluster.OK(t, "fsb-ctl", "delete", name)
	gone(t, cluster.Namespace, name, uid)
}

// TestSessionByCurl is the same session by curl alone.
func TestSessionByCurl(t *testing.T) {
	name, port := uniqueName("session"), "8392"
	all := "/v1/namespaces/" + cluster.Namespace + "/sandboxes"
	box := all + "/" + name
	post := func(path, body string) string {
		t.Helper()
		return curl(t, path, "-H", "Content-Type: application/json", "-d", body)
	}
	post(all, fmt.Sprintf(`{"name":%q,"spec":{"image":%q,"keepAlive":true}}`, name, cluster.Python))
	uid := customResource(t, name, running).EffectiveUID()
	require.Contains(t, post(box+"/processes:run", `{"process":{"args":["python3","-c","print(6*7)"]}}`), encoded("42\n"))
	post(box+"/files:makeDirectory", `{"path":"/tmp/srv"}`)
	watch := stay(t, box+"/files:watch?path=/tmp/srv")
	watch.await(t, "TYPE_STARTED")
	local := filepath.Join(t.TempDir(), "hello.py")
	require.NoError(t, os.WriteFile(local, []byte(program), 0o600))
	curl(t, box+"/files?path="+hello, "-T", local)
	watch.await(t, hello)
	require.Equal(t, program, curl(t, box+"/files?path="+hello))
	require.Contains(t, post(box+"/processes:run", `{"process":{"args":`+quoted("python3", hello)+`}}`), encoded("from a file\n"))

	shell := stay(t, box+"/processes", "-H", "Content-Type: application/json", "-d", `{"stdin":true,"process":{"args":["sh"],"tag":"shell"}}`)
	shell.await(t, "started")
	post(box+"/processes:input", `{"process":{"tag":"shell"},"data":"`+encoded("cd /usr; x=kept; echo ready\n")+`"}`)
	shell.await(t, encoded("ready\n"))
	shell.end()
	shell = stay(t, box+"/processes:connect?process.tag=shell")
	shell.await(t, "started")
	post(box+"/processes:input", `{"process":{"tag":"shell"},"data":"`+encoded("echo $x in $PWD\n")+`"}`)
	shell.await(t, encoded("kept in /usr\n"))

	stay(t, box+"/processes", "-H", "Content-Type: application/json", "-d", `{"process":{"args":`+quoted(server(port)...)+`}}`).await(t, "started")
	require.True(t, eventually(settle, func() bool { return curl(t, box+"/ports/"+port+"/hello.py") == program }))
	curl(t, box, "-X", "DELETE")
	gone(t, cluster.Namespace, name, uid)
}

// stay reads a stream of the gateway with curl.
func stay(t *testing.T, path string, args ...string) *companion {
	t.Helper()
	return background(t, "curl", append([]string{"-sSN", "--cacert", cluster.Env(t, "FSB_CACERT"), "--cert", cluster.Env(t, "FSB_CERT"),
		"--key", cluster.Env(t, "FSB_KEY"), cluster.Env(t, "FSB_GATEWAY") + path}, args...)...)
}

// TestSessionByGrpcurl is the same session by grpcurl alone.
func TestSessionByGrpcurl(t *testing.T) {
	name, port := uniqueName("session"), "8393"
	of := fmt.Sprintf(`"namespace":%q,"name":%q`, cluster.Namespace, name)
	flags := []string{"-cacert", cluster.Env(t, "FSB_CACERT"), "-cert", cluster.Env(t, "FSB_CERT"), "-key", cluster.Env(t, "FSB_KEY"), "-d"}
	call := func(method string, messages ...string) string {
		t.Helper()
		r := cluster.Run(t, strings.Join(messages, "\n"), "tools/grpcurl", append(flags, "@", cluster.Env(t, "FSB_ADDR"), method)...)
		require.Zero(t, r.Code, r.Stderr)
		return r.Stdout
	}
	open := func(method string, messages ...string) *companion {
		t.Helper()
		c := background(t, cluster.Binary(t, "tools/grpcurl"), append(flags, "@", cluster.Env(t, "FSB_ADDR"), method)...)
		for _, m := range messages {
			c.write(t, m+"\n")
		}
		return c
	}
	const processes, files = "fastsandbox.process.v1.ProcessService/", "fastsandbox.filesystem.v1.FilesystemService/"
	call("fastsandbox.sandbox.v1.SandboxService/CreateSandbox", fmt.Sprintf(`{%s,"spec":{"image":%q,"keepAlive":true}}`, of, cluster.Python))
	uid := customResource(t, name, running).EffectiveUID()
	require.Contains(t, call(processes+"RunProcess", `{`+of+`,"process":{"args":["python3","-c","print(6*7)"]}}`), encoded("42\n"))
	call(files+"MakeDirectory", `{`+of+`,"path":"/tmp/srv"}`)
	watch := open(files+"WatchDirectory", `{`+of+`,"path":"/tmp/srv"}`)
	require.NoError(t, watch.stdin.Close())
	watch.await(t, "TYPE_STARTED")
	call(files+"WriteFile", `{`+of+`,"header":{"path":"`+hello+`"}}`, `{"data":"`+encoded(program)+`"}`)
	watch.await(t, hello)
	require.Contains(t, call(files+"ReadFile", `{`+of+`,"path":"`+hello+`"}`), encoded(program))
	require.Contains(t, call(processes+"RunProcess", `{`+of+`,"process":{"args":`+quoted("python3", hello)+`}}`), encoded("from a file\n"))

	start := func(body string) *companion {
		t.Helper()
		c := open(processes+"StartProcess", `{`+of+`,`+body+`}`)
		require.NoError(t, c.stdin.Close())
		c.await(t, "started")
		return c
	}
	shell := start(`"stdin":true,"process":{"args":["sh"],"tag":"shell"}`)
	call(processes+"SendInput", `{`+of+`,"process":{"tag":"shell"},"data":"`+encoded("cd /usr; x=kept; echo ready\n")+`"}`)
	shell.await(t, encoded("ready\n"))
	shell.end()
	shell = open(processes+"ConnectProcess", `{`+of+`,"process":{"tag":"shell"}}`)
	require.NoError(t, shell.stdin.Close())
	shell.await(t, "started")
	call(processes+"SendInput", `{`+of+`,"process":{"tag":"shell"},"data":"`+encoded("echo $x in $PWD\n")+`"}`)
	shell.await(t, encoded("kept in /usr\n"))

	start(`"process":{"args":` + quoted(server(port)...) + `}`)
	require.True(t, eventually(settle, func() bool {
		tunnel := open("fastsandbox.tunnel.v1.TunnelService/Tunnel", `{`+of+`}`, `{"frame":{"connection":1,"open":{"port":`+port+`}}}`)
		defer tunnel.end()
		tunnel.await(t, `"connection": 1`)
		if tunnel.has("refused") {
			return false // the server does not listen yet
		}
		tunnel.write(t, `{"frame":{"connection":1,"data":"`+encoded("GET /hello.py HTTP/1.0\r\n\r\n")+`"}}`+"\n")
		return eventually(5*time.Second, func() bool { return strings.Contains(tunnel.data(), program) })
	}))
	call("fastsandbox.sandbox.v1.SandboxService/DeleteSandbox", `{`+of+`}`)
	gone(t, cluster.Namespace, name, uid)
}

func (c *companion) has(text string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Contains(strings.Join(c.lines, "\n"), text)
}

// data returns what the messages of a tunnel have as data.
func (c *companion) data() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out strings.Builder
	for _, line := range c.lines {
		if _, value, ok := strings.Cut(line, `"data": `); ok {
			raw, _ := base64.StdEncoding.DecodeString(strings.Trim(value, `", `))
			out.Write(raw)
		}
	}
	return out.String()
}
