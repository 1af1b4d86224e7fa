// Command registry serves go-containerregistry's registry for tests: OCI distribution in memory, with the referrers API
// or without, by TLS or plain http, and behind a user and password where a test wants them.
package main

import (
	"crypto/subtle"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
)

func main() {
	address := flag.String("address", "127.0.0.1:0", "host and port to serve on; port 0: any, which is printed")
	referrers := flag.Bool("referrers", false, "serve the referrers API")
	certificate := flag.String("tls-cert", "", "certificate (PEM); with -tls-key")
	key := flag.String("tls-key", "", "key (PEM)")
	user := flag.String("user", "", "ask for this user; the password is in REGISTRY_PASSWORD")
	blobs := flag.String("blobs", "", "keep blobs in this folder, which must exist; left out: in memory")
	version := flag.Bool("version", false, "print the version")
	flag.Parse()
	if *version {
		fmt.Println("registry 0.22.1")
		return
	}
	options := []registry.Option{
		registry.WithReferrersSupport(*referrers),
		registry.Logger(log.New(os.Stderr, "", log.LstdFlags)),
	}
	if *blobs != "" {
		options = append(options, registry.WithBlobHandler(registry.NewDiskBlobHandler(*blobs)))
	}
	handler := registry.New(options...)
	if *user != "" {
		handler = guarded(handler, *user, os.Getenv("REGISTRY_PASSWORD"))
	}
	listener, err := net.Listen("tcp", *address)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("serving on", listener.Addr())
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	if *certificate != "" {
		log.Fatal(server.ServeTLS(listener, *certificate, *key))
	}
	log.Fatal(server.Serve(listener))
}

// guarded asks everybody for one user and password, by the Basic scheme.
func guarded(next http.Handler, user, password string) http.Handler {
	return http.HandlerFunc(func(response http.ResponseWriter, request *http.Request) {
		givenUser, givenPassword, _ := request.BasicAuth()
		same := subtle.ConstantTimeCompare([]byte(givenUser+":"+givenPassword), []byte(user+":"+password))
		if same != 1 {
			response.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
			http.Error(response, `{"errors":[{"code":"UNAUTHORIZED"}]}`, http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(response, request)
	})
}
